"""Prefix joins: new tokens that are both concatenated to a buffer's filled part and written into it become a write and a view.

    keys = cat([cache[:, :, :start], k], 2)              cache[:, :, start : start + n] = k
    cache[:, :, start : start + n] = k              is   keys = cache[:, :, : start + n]

in either order of the two, provided that nothing else reads or writes the buffer between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.operators import CONCATENATIONS
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, same, value_of

aten = torch.ops.aten


def join_prefixes(graph: fx.Graph) -> None:
    """Replace each concatenation of a buffer's filled part and new tokens by a view of the buffer, in place.

    It must be a buffer into which the new tokens are also written, right after the filled part.
    """
    joins = [node for node in graph.nodes if _joins(node)]
    effects = analyse(graph) if joins else None
    for node in joins:
        if effects is not None and (write := _write_of(node, effects)) is not None and _turn(graph, node, write, effects):
            effects = analyse(graph)


def _joins(node: fx.Node) -> bool:
    """Return whether a node concatenates a slice of an input and one other tensor."""
    if op_name(node) not in CONCATENATIONS:
        return False
    parts = bind(node)["tensors"]
    first = len(parts) == 2 and all(is_tensor(part) for part in parts) and op_name(parts[0]) == "slice"
    return first and bind(parts[0])["self"].op == "placeholder"


def _write_of(join: fx.Node, effects: Effects) -> fx.Node | None:
    """Return the node that writes the new tokens of ``join`` into the buffer, directly after the past tokens; None if there is none."""
    parts = bind(join)["tensors"]
    past, dim = bind(parts[0]), bind(join)["dim"] % value_of(join).dim()
    root, writes = past["self"], effects.writes.get(past["self"], ())
    if len(writes) != 1 or past["start"] not in {None, 0} or past["step"] != 1:
        return None
    write = writes[0]
    place, value = (write.args[0], write.args[1]) if op_name(write) == "copy_" else (None, None)
    if value is not parts[1] or op_name(place) != "slice":
        return None
    there = bind(place)  # type: ignore[arg-type]
    alike = there["self"] is root and there["dim"] % value_of(root).dim() == past["dim"] % value_of(root).dim() == dim
    if not alike or there["step"] != 1 or not _equal(there["start"] or 0, past["end"]) or not _one_shape(place, parts[1]):  # type: ignore[arg-type]
        return None
    return write


def _one_shape(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two tensors have equal sizes in every call; False if that cannot be proved."""
    one, other = value_of(a).shape, value_of(b).shape
    return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))


def _equal(a: Any, b: Any) -> bool:
    """Return whether two bounds of slices are equal in every call: one node, or equal ints; False for others, whatever their values."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _turn(graph: fx.Graph, join: fx.Node, write: fx.Node, effects: Effects) -> bool:
    """Replace ``join`` by a view of the buffer after ``write``, if that is equivalent; return whether it was replaced."""
    place, past = write.args[0], bind(join)["tensors"][0]
    root, end, dim = bind(past)["self"], bind(place)["end"], bind(past)["dim"]  # type: ignore[arg-type]
    first, last = sorted((join, write), key=effects.order.__getitem__)
    if effects.writes_between(bind(join)["tensors"][1], first, last) or effects.writes_to(join):
        # The written and the concatenated tokens differ, or the concatenation is changed later and the buffer is not.
        return False
    others = {user for view in effects.family(root) for user in view.users} - {join, write, past, place}
    if any(effects.order[first] < effects.order[user] < effects.order[last] for user in others):
        return False
    if any(effects.order[user] < effects.order[last] for user in join.users) and last is write:
        # The write, and the nodes that compute its end, move ahead of the attention.
        moving = [item for item in (end, place, write) if isinstance(item, fx.Node) and effects.order[item] > effects.order[join]]
        known = {item for item in graph.nodes if effects.order[item] < effects.order[join]} | set(moving)
        if any(operand not in known for item in moving for operand in item.all_input_nodes):
            return False
        for item in moving:
            join.prepend(item)
        last = join
    with graph.inserting_after(last):
        read = graph.call_function(aten.slice.Tensor, (root, dim, 0, end, 1))
    read.meta = {**join.meta, "val": _sliced(root, dim, value_of(join))}
    join.replace_all_uses_with(read)
    graph.erase_node(join)
    return True


def _sliced(root: fx.Node, dim: int, like: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = value_of(root).narrow(dim, 0, like.shape[dim])
    return part
