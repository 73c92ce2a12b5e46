"""New tokens that no cache holds: the tensor that an attention's keys or values are views of, in a graph without a cache."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import sizes, value_of
from kvcompile.passes.match.cache.readings import Read
from kvcompile.passes.match.cache.slots import axes_of, slot_of
from kvcompile.passes.match.sites import Miss, Position, Slot, Write
from kvcompile.passes.match.slot_kinds import SlotKind


def without_cache(operand: fx.Node, roles: tuple[str, ...], effects: Effects) -> Slot:
    """Return, as a slot, the new tokens of which an attention operand is a view, in a graph without a cache.

    The slot's root is the computed tensor, or its first view that has separate dims for tokens and batch rows: one projection may compute
    queries, keys and values of all rows. Raises Miss if no tensor holds them in this way, or if something writes to it.
    """
    if "T" not in roles:
        raise Miss("what the attention's weights are multiplied with has no dim of tokens", operand)
    whole = trace(operand, lambda node: False, scales=True)
    if effects.writes_to(whole.base):
        raise Miss("keys or values are read from a tensor that is written to in place", whole.base, advice="make it without such writes")
    missed: list[Miss] = []
    for root in (whole.base, *reversed(whole.path)):
        try:
            return _new_tokens(operand, roles, root)
        except Miss as miss:
            missed.append(miss)
    raise missed[0]


def _new_tokens(operand: fx.Node, roles: tuple[str, ...], root: fx.Node) -> Slot:
    """Return the slot of an operand that is a view of ``root``; raises Miss where no dim of the root is the tokens."""
    read, trail = Read(operand, roles, sizes(operand)), trace(operand, lambda node: node is root, scales=True)
    tokens, count = trail.here[:, roles.index("T")], read.shape[roles.index("T")]
    dims = [dim for dim, size in enumerate(sizes(root)) if (trail.there[:, dim] == tokens).all() and size == count]
    if not dims:
        raise Miss("keys or values are no plain view of one tensor with a dim that is the tokens", root)
    axes, heads, reading = axes_of(trail, read, dims[0])
    write = Write("not cached", root, root, root, tuple(range(len(sizes(root)))), dims[0], Position(), value_of(root).shape[dims[0]])
    return slot_of(SlotKind.NEW, root, None, (), axes, heads, write, trail, reading)
