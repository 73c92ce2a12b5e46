"""Reach: how many tokens an attention reads, and whether its upper limit may lie after the last of them.

A dense tensor ends with the last token that is read, so a limit after it hides nothing. A store goes on to the end of its last page with
zeros that must never be attended to. A sliding cache that a model writes at ``position % capacity`` has such a limit: its mask compares
with the position, which grows past the capacity.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from kvcompile.passes.graph.casts import holds
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.pullback import PULLBACKS
from kvcompile.passes.graph.shapes import at_most, is_tensor, op_name, size_along, value_of
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.match.sites import LimitKind, Site


def reach(site: Site) -> Any:
    """Return how many tokens of a buffer an attention reads even if fewer were written, an int or a SymInt.

    It is the constant upper limit on positions, or the buffer's length if no mask hides tokens. It is 0 if positions limit the tokens, and
    for caches that grow or are paged.
    """
    bounds, attention, slot = site.bounds, site.attention, site.key
    if slot.kind.facts.grows or slot.block_table is not None:
        return 0
    if bounds.hi.kind is LimitKind.CONST:
        return bounds.hi.shift + 1
    if bounds.hi.kind is LimitKind.ALL and not hiding(bounds):
        return value_of(attention.k).shape[attention.k_roles.index("T")]
    return 0


def unbounded(site: Site) -> bool:
    """Return whether the masks of a buffer's attention may show slots after the newest token, which the call's positions cannot tell."""
    slot = site.key
    if not slot.kind.facts.fixed or slot.block_table is not None or slot.sliding is not None:
        return False
    return exceeds(site) if site.bounds.hi.kind is not LimitKind.ALL else bool(hiding(site.bounds))


def exceeds(site: Site) -> bool:
    """Return whether the upper limit of a site may be after the last token that it reads."""
    hi, attention = site.bounds.hi, site.attention
    if hi.kind is LimitKind.ALL:
        return False
    if hi.kind is LimitKind.NODE:
        index = site.key.write.position.index
        return index is None or hi.offset > 0 or hi.amount is not None or held(index) is not held(hi.node)  # type: ignore[arg-type]
    most = hi.shift
    if hi.kind is LimitKind.OWN:
        most = most + size_along(attention.q, attention.q_roles, "S", attention.folded) - 1
    return not at_most(most, value_of(attention.k).shape[attention.k_roles.index("T")] - 1)


def held(node: fx.Node) -> fx.Node:
    """Return the tensor at the start of the views and exact casts that end in ``node``: bounds on its values hold for ``node`` too."""
    while op_name(node) in PULLBACKS.keys() | COPIES and is_tensor(node.args[0]) and holds(
        value_of(node.args[0]).dtype, value_of(node).dtype
    ):
        node = node.args[0]
    return node
