"""Functional caches: rewrite an out-of-place update that is copied back at the end into an in-place write.

    keys = index_put(cache, [None, None, pos], k)        index_put_(cache, [None, None, pos], k)
    y = attention(q, keys)                          is   y = attention(q, cache)
    cache.copy_(keys)

``torch.export`` and its decompositions produce the left form from a module that writes into its buffers. Both are equal if nothing reads
the cache's old contents after the update, and nothing else writes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import is_wrapper
from kvcompile.passes.graph.effects import Effects, analyse, same_memory
from kvcompile.passes.graph.operators import SIZES
from kvcompile.passes.graph.shapes import at_most, bind, is_tensor, op_name, rank, same, same_shape, value_of

aten = torch.ops.aten

WRITES = {
    "index_put": aten.index_put_, "_unsafe_index_put": aten.index_put_, "index_copy": aten.index_copy_, "scatter": aten.scatter_,
    "copy": aten.copy_,
}
"""Functional updates of a whole tensor, and the in-place operators with the same operands."""
PARTS = {"slice_scatter": aten.slice.Tensor, "select_scatter": aten.select.int}
"""Functional updates of a part of a tensor, and the operators that return a view of that part."""


@dataclass(frozen=True)
class _PartialUpdate:
    """An out-of-place update that returns ``old`` with one part replaced by ``new``.

    ``view(old, *where, **named)`` is a view of that part.
    """

    old: Any
    new: Any
    view: Any
    where: tuple[Any, ...]
    named: dict[str, Any]


def _part(node: Any) -> _PartialUpdate | None:
    """Return the partial update that ``node`` makes; None if it makes none."""
    if op_name(node) in PARTS:
        return _PartialUpdate(node.args[0], node.args[1], PARTS[op_name(node)], tuple(node.args[2:]), node.kwargs)
    return _entry(node) if op_name(node) == "where" and len(node.args) == 3 else None


def _entry(node: Any) -> _PartialUpdate | None:
    """Return the partial update that ``node``, a ``where``, makes if it is a decomposed select_scatter; else None.

    That is where(arange(n) along a dim == index, new entry along that dim, old).
    """
    chosen, wide, old = node.args
    if op_name(chosen) != "eq" or op_name(wide) != "expand" or op_name(wide.args[0]) != "unsqueeze":
        return None
    line, index = chosen.args
    counted: Any = line.args[0] if op_name(line) == "view" else None
    new, dim = wide.args[0].args
    dim %= rank(node)
    if op_name(counted) != "arange" or isinstance(index, bool) or not isinstance(index, int) or not is_tensor(old):
        return None
    length = value_of(node).shape[dim]
    one = [length if at == dim else 1 for at in range(rank(node))]
    numbers = bind(counted)
    plain = not numbers.get("start") and (numbers.get("step") or 1) == 1
    alike = rank(line) == len(one) and all(same(size, other) for size, other in zip(value_of(line).shape, one, strict=True))
    if not plain or not alike or not same_shape(old, node) or index < 0 or not at_most(index + 1, length):
        return None
    return _PartialUpdate(old, new, aten.select.int, (dim, index), {})


Call = Callable[..., fx.Node]


def write_in_place(graph: fx.Graph) -> None:
    """Rewrite in the graph every out-of-place update of an input that is copied back into it, as an in-place write to the input."""
    copies = [node for node in graph.nodes if _copies_back(node)]
    effects = analyse(graph) if copies else None
    for copy in copies:
        assert effects is not None
        cache = bind(copy)["self"]
        updates = _updates(bind(copy)["src"], cache)
        if updates and _alone(cache, updates, copy, effects):
            _turn(graph, cache, updates, copy, effects)


def _copies_back(node: fx.Node) -> bool:
    """Return whether a node copies a tensor, which something else reads too, into an input of equal shape and dtype."""
    if op_name(node) != "copy_":
        return False
    into, made = bind(node)["self"], bind(node)["src"]
    return (
        into.op == "placeholder" and is_tensor(made) and same_shape(into, made) and value_of(into).dtype == value_of(made).dtype
        and any(op_name(user) not in SIZES for user in set(made.users) - {node})
    )


def _updates(made: fx.Node, cache: fx.Node) -> list[fx.Node]:
    """Return the updates from ``cache`` to ``made``, in order; empty if anything but updates is between them."""
    found: list[fx.Node] = []
    while made is not cache:
        part = _part(made)
        old = part.old if part is not None else made.args[0] if op_name(made) in WRITES else None
        if not is_tensor(old):
            return []
        found.append(made)
        made = old
    return found[::-1]


def _alone(cache: fx.Node, updates: list[fx.Node], copy: fx.Node, effects: Effects) -> bool:
    """Return whether only the updates and the copy write to the cache, and nothing reads contents that an update has replaced."""
    if set(effects.writes_to(cache)) != {copy} or any(effects.writes_to(made) for made in updates):
        return False
    inputs = (node for node in effects.order if node.op == "placeholder" and node is not cache and is_tensor(node))
    if any(not is_wrapper(value_of(other)) and same_memory(cache, other) for other in inputs):
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
    """Emit the updates as writes to ``cache``, and remove the updates and the copy."""
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
    """Emit writes to ``place``, a view of the cache, equal to the update ``made``; nested partial updates write to nested views."""
    name = op_name(made)
    if name in WRITES:
        overload = getattr(WRITES[name], made.target._overloadname)  # type: ignore[union-attr]
        call(overload, place, *made.args[1:], **made.kwargs)
        return
    part = _part(made)
    assert part is not None
    view = call(part.view, place, *part.where, **part.named)
    if (op_name(part.new) in WRITES and _is_part(part.new.args[0], part)) or ((inner := _part(part.new)) and _is_part(inner.old, part)):
        _write(call, part.new, view)
    else:
        call(aten.copy_.default, view, part.new)


def _is_part(node: Any, part: _PartialUpdate) -> bool:
    """Return whether ``node`` is the view of the part of ``part.old`` that ``part`` updates."""
    if not isinstance(node, fx.Node) or node.target is not part.view or node.args[0] is not part.old or node.kwargs != part.named:
        return False
    given: Any = node.args[1:]
    if not part.where or not given:
        return tuple(given) == part.where
    dim, *rest = given
    dims = rank(node.args[0])
    return (dim % dims, *rest) == (part.where[0] % dims, *part.where[1:])
