"""Caches that a functional graph updates out of place and copies back at its end, in the form that recognisers know: written in place.

    keys = index_put(cache, [None, None, pos], k)        index_put_(cache, [None, None, pos], k)
    y = attention(q, keys)                          is   y = attention(q, cache)
    cache.copy_(keys)

which is what ``torch.export`` and its decompositions make of a module that writes into its buffers. The two are one where nobody reads
what the cache held before, once it is updated, and nobody else writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.effects import Effects, analyse
from kvcompile.passes.graph.operators import SIZES
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, same_shape, value_of

aten = torch.ops.aten

WRITES = {
    "index_put": aten.index_put_, "_unsafe_index_put": aten.index_put_, "index_copy": aten.index_copy_, "scatter": aten.scatter_,
    "copy": aten.copy_,
}
"""Updates of a whole tensor that have an operator in place with the same operands."""
PARTS = {"slice_scatter": aten.slice.Tensor, "select_scatter": aten.select.int}
"""Updates of a part of a tensor, and the view of that part."""

Call = Callable[..., fx.Node]


def write_in_place(graph: fx.Graph) -> None:
    """Turn every update of an input that is copied back into it into a write to it, in place."""
    copies = [node for node in graph.nodes if _copies_back(node)]
    effects = analyse(graph) if copies else None
    for copy in copies:
        assert effects is not None
        cache = bind(copy)["self"]
        updates = _updates(bind(copy)["src"], cache)
        if updates and _alone(cache, updates, copy, effects):
            _turn(graph, cache, updates, copy, effects)


def _copies_back(node: fx.Node) -> bool:
    """Whether a node copies a tensor into an input of its shape and dtype."""
    if op_name(node) != "copy_":
        return False
    into, made = bind(node)["self"], bind(node)["src"]
    return (
        into.op == "placeholder" and is_tensor(made) and same_shape(into, made) and value_of(into).dtype == value_of(made).dtype
        and any(op_name(user) not in SIZES for user in set(made.users) - {node})
    )


def _updates(made: fx.Node, cache: fx.Node) -> list[fx.Node]:
    """The updates that make a tensor out of the cache, in order; none where it is not made of it by updates alone."""
    found: list[fx.Node] = []
    while made is not cache:
        if op_name(made) not in WRITES.keys() | PARTS.keys() or not is_tensor(made.args[0]):
            return []
        found.append(made)
        made = made.args[0]
    return found[::-1]


def _alone(cache: fx.Node, updates: list[fx.Node], copy: fx.Node, effects: Effects) -> bool:
    """Whether nobody but the updates and the copy writes, and nobody reads what one of the updates has replaced."""
    if set(effects.writes_to(cache)) != {copy} or any(effects.writes_to(made) for made in updates):
        return False
    for held, following in zip((cache, *updates), (*updates, None), strict=True):
        readers = effects.readers(held) - {copy}
        if effects.output in readers and held is not cache:
            return False
        if following is not None and any(
            effects.order[reader] > effects.order[following] for reader in readers if reader is not effects.output
        ):
            return False
    return True


def _turn(graph: fx.Graph, cache: fx.Node, updates: list[fx.Node], copy: fx.Node, effects: Effects) -> None:
    for made in updates:
        def call(target: Any, *args: Any, made: fx.Node = made, **kwargs: Any) -> fx.Node:
            with graph.inserting_before(made):
                node = graph.call_function(target, args, kwargs)
            node.meta = {key: value for key, value in made.meta.items() if key not in {"val", "tensor_meta"}}
            writes = target._schema.is_mutable
            node.meta["val"] = value_of(args[0]) if writes else target(*fx.node.map_arg(args, value_of))
            effects.order[node] = effects.order[made]
            return node

        _write(call, made, cache)
    copy.replace_all_uses_with(cache)
    graph.erase_node(copy)
    for made in reversed(updates):
        made.replace_all_uses_with(cache)
        graph.erase_node(made)


def _write(call: Call, made: fx.Node, place: fx.Node) -> None:
    """Emit the writes to ``place`` that ``made`` is the update of: of a part of it where what the part becomes is an update too."""
    name = op_name(made)
    if name in WRITES:
        overload = getattr(WRITES[name], made.target._overloadname)  # type: ignore[union-attr]
        call(overload, place, *made.args[1:], **made.kwargs)
        return
    old, new, *where = made.args
    part = call(PARTS[name], place, *where, **made.kwargs)
    if op_name(new) in WRITES.keys() | PARTS.keys() and _is_part(new.args[0], PARTS[name], old, where, made.kwargs):  # type: ignore[union-attr]
        _write(call, new, part)  # type: ignore[arg-type]
    else:
        call(aten.copy_.default, part, new)


def _is_part(node: object, view: Any, old: object, where: list[Any], named: dict[str, Any]) -> bool:
    """Whether a node is the part of ``old`` that an update replaces."""
    return isinstance(node, fx.Node) and node.target is view and node.args[0] is old and list(node.args[1:]) == where and node.kwargs == named
