"""Reach: how far attention reads, and whether a mask's upper limit may name positions behind the tokens that it reads.

The dense tensor ends there, so such a limit hides nothing. A store goes on to the end of its last page, where
zeros lie that must never be attended to: a sliding cache written by hand at ``position % capacity`` is masked by the
position, which grows past the capacity.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from kvcompile.passes.graph.casts import holds
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.pullback import STEPS
from kvcompile.passes.graph.shapes import at_most, is_tensor, op_name, size_along, value_of
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.match.sites import LimitKind, Site


def reach(site: Site) -> Any:
    """How many tokens a buffer's attention may read whatever was written, int or symbolic; 0 where its mask says no more than that."""
    bounds, attention, slot = site.bounds, site.attention, site.key
    if slot.kind.facts.grows or slot.block_table is not None:
        return 0
    if bounds.hi.kind is LimitKind.CONST:
        return bounds.hi.shift + 1
    if bounds.hi.kind is LimitKind.ALL and not hiding(bounds):
        return value_of(attention.k).shape[attention.k_roles.index("T")]
    return 0


def unbounded(site: Site) -> bool:
    """Whether the masks of a buffer's attention may show places behind the newest token, which the positions of a call do not tell."""
    slot = site.key
    if not slot.kind.facts.fixed or slot.block_table is not None or slot.sliding is not None:
        return False
    return exceeds(site) if site.bounds.hi.kind is not LimitKind.ALL else bool(hiding(site.bounds))


def exceeds(site: Site) -> bool:
    """Whether the upper limit of a site may lie behind the last token that it reads."""
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
    """The tensor that holds the values of a view or an exact copy: a bound on the ones bounds the others."""
    while op_name(node) in STEPS.keys() | COPIES and is_tensor(node.args[0]) and holds(value_of(node.args[0]).dtype, value_of(node).dtype):
        node = node.args[0]
    return node
