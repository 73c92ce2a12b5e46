"""Appends in a graph compiled for CUDA: each by a kernel of this package or, if none supports it, by its eager body, traced.

``append``         The kernel of ``rows``, for one token or many: one launch for keys and values together. The traced body has some forty
                   nodes a slot, half of a layer's nodes in a decode step, and becomes four kernels. A scheme that encodes by a constant
                   plane, thresholds or scales, has a kernel of its own (``Scheme.append_kernel``): one launch a slot.
``append_window``  One token: ``window_token``, or the kernel of the scheme's own plugin. Many tokens: ``window_blocks``; if that does not
                   support them, the operation stays in the graph and runs its eager body, untraced.

Many tokens are not traced into a window since encoding with calibrated planes is hundreds of nodes a layer: a model of 32 layers compiled
for more than five minutes, and a prefill runs once.

``pair`` merges an append of keys and one of values into one call if no node between them can observe the difference.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.append import operations as append_ops
from kvcompile.lowering.append.operations import ROW_OPERANDS
from kvcompile.lowering.attention_plugins import append_of, own_append
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.append_window import one_token

TABLED_OPERANDS, WINDOW_CALL = 6, 5
"""Number of operands of ``append`` with a table or given scales, and of ``append_window`` without; window kernels support neither."""

Appended = tuple[torch.Tensor, torch.Tensor] | None


def append_traced(*operands: Any) -> None:
    """Run ``append`` in a compiled graph, by kernels or its body."""
    _rows([operands])


def append_window_traced(*operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``append_window`` in a compiled graph, by kernels or its body; return its results: (newest tokens, origins in force)."""
    return _windows([operands])[0]


def append_both(*operands: Any) -> None:
    """Run ``append`` for keys and for values, in one launch if possible.

    ``operands``: the operands of ``append`` for keys, then the operands for values.
    """
    _rows(_halves(operands))


def append_window_both(*operands: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run ``append_window`` for keys and for values, in one launch if possible; return the results of both calls.

    ``operands``: the operands of the call for keys, then the operands of the call for values.
    """
    return _windows(_halves(operands))


def _halves(operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the operands of two calls, which ``operands`` lists one after the other, as one tuple for each call."""
    count = len(operands) // 2
    return [operands[:count], operands[count:]]


def _rows(calls: list[tuple[Any, ...]]) -> None:
    x = calls[0][0]
    if x.device.type == "cuda" and any(len(call) == TABLED_OPERANDS for call in calls):
        for call in calls:
            _tabled(call)
        return
    if x.device.type == "cuda":
        from kvcompile.lowering.append.rows import Rows, fits

        # The kernels do not take padding: schemes whose tokens share scales use the body anyway.
        slots = [Rows(*call[:ROW_OPERANDS]) for call in calls]
        if all(len(call) == ROW_OPERANDS for call in calls) and all(fits(slot) and slot.x.shape[0] == x.shape[0] for slot in slots):
            kernel = append_ops.append_kernel if len(calls) == 1 else append_ops.append_kernel_pair
            kernel(*(operand for call in calls for operand in call))
            return
        if len(calls) > 1:
            for call in calls:
                _rows([call])
            return
    for call in calls:
        ops.append_body(*call)


def _tabled(call: tuple[Any, ...]) -> None:
    """Run one ``append``: by the scheme's own kernel for its constant plane if that kernel supports the call, else by the eager body."""
    if len(call) == TABLED_OPERANDS and call[4] is None and len(call[5]) == 1:
        x, planes, pos, scheme, _, (constant,) = call
        own = append_of(scheme)
        if own is not None and own.fits((x, list(planes), pos, constant, scheme)):
            append_ops.append_own_kernel(x, planes, pos, constant, scheme)
            return
    ops.append_body(*call)


def _windows(calls: list[tuple[Any, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if calls[0][0].device.type == "cuda" and any(len(call) > WINDOW_CALL for call in calls):
        return [ops.append_window_body(*call) if one_token(call[0]) else ops.append_window(*call) for call in calls]
    if calls[0][0].device.type == "cuda":
        from kvcompile.lowering.append import window_blocks as triton_append_blocks
        from kvcompile.lowering.append.window_token import WindowSlot, fits

        slots = [WindowSlot(*call) for call in calls]
        many = all(triton_append_blocks.fits(slot) and slot.x.shape[0] == slots[0].x.shape[0] for slot in slots)
        own = own_append(slots)
        if many or all(fits(slot) for slot in slots) or (own is not None and all(own.fits(slot) for slot in slots)):
            return _window_kernels(slots)
        if len(calls) > 1:
            return [result for call in calls for result in _windows([call])]
        if not one_token(slots[0].x):
            return [ops.append_window(*calls[0])]
    return [ops.append_window_body(*call) for call in calls]


def _window_kernels(slots: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run ``append_window`` by kernels for one slot or two; return its results for each: (newest tokens, origins in force)."""
    # The origins are read from the clock before the kernels update it.
    used = [slot.used for slot in slots]
    operands = [
        operand for slot in slots for operand in (
            slot.x, append_ops.written(slot.planes), slot.own[0] if slot.corrects else None, slot.pos, slot.origin, slot.scheme,
        )
    ]
    if len(slots) == 1:
        return [(append_ops.append_window_kernel(*operands), used[0])]
    return list(zip(append_ops.append_window_kernel_pair(*operands), used, strict=True))


BOTH: dict[Any, Any] = {ops.append: append_both, ops.append_window: append_window_both}


def pair(graph: fx.Graph) -> None:
    """Merge two appends, of keys and of values, into one call at the second one's node, if delaying the first to there changes no result.

    It changes none if no node between them uses the first one's results or planes, or changes anything in place.
    """
    for node in list(graph.find_nodes(op="call_function", target=ops.keep_first)):
        _defer(node)
    earlier: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in BOTH:
            first = earlier.pop(node.target, None)
            if first is None or not _alike(first, node) or _uses(node, first):
                earlier = {node.target: node}
                continue
            _join(graph, first, node)
            earlier = {}
        elif _changes(node):
            earlier = {}
        else:
            # A getitem of the results moves along; any other reader of results or planes ends the pairing.
            earlier = {target: first for target, first in earlier.items() if not _uses(node, first) or _is_result(node, first)}
    graph.lint()


def _defer(node: fx.Node) -> None:
    """Move the operation that keeps first tokens, with the slice that only it reads, after the kernel appends that follow it.

    The operation writes planes of its own, so it may move past an append, but not past a reader of its planes or other in-place changes.
    """
    own: set[fx.Node] = {node, *node.args[1]}  # type: ignore[misc]
    tokens = node.args[0]
    assert isinstance(tokens, fx.Node)
    moved = [node]
    if tokens.target is torch.ops.aten.slice.Tensor and list(tokens.users) == [node]:
        moved.insert(0, tokens)
    stop = node.next
    while stop.op == "call_function" and own.isdisjoint(stop.all_input_nodes) and (stop.target in BOTH or not _changes(stop)):
        stop = stop.next
    for each in moved:
        stop.prepend(each)


def _is_result(node: fx.Node, first: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0] is first


def _uses(node: fx.Node, first: fx.Node) -> bool:
    """Return whether ``node`` reads the results of the append ``first`` or one of its planes."""
    made = {first, *first.users, *(first.args[1])}  # type: ignore[misc]
    return any(item in made for item in node.all_input_nodes)


def _changes(node: fx.Node) -> bool:
    """Return whether a node may change memory in place."""
    if getattr(node.target, "__module__", None) in {"_operator", "math"}:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _alike(first: fx.Node, second: fx.Node) -> bool:
    """Return whether two appends have equal numbers of positional operands and no keyword operands."""
    return not first.kwargs and not second.kwargs and len(first.args) == len(second.args)


def _join(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Replace the appends ``first`` and ``second`` of ``graph`` by one call at the second one's node, and their results by the call's."""
    with graph.inserting_before(second):
        both = graph.call_function(BOTH[first.target], (*first.args, *second.args))
        both.meta = dict(second.meta)
        for index, node in enumerate((first, second)):
            users = list(node.users)
            given = graph.call_function(operator.getitem, (both, index)) if users else both
            for user in users:
                assert _is_result(user, node)
                moved = graph.call_function(operator.getitem, (given, user.args[1]))
                moved.meta = dict(user.meta)
                user.replace_all_uses_with(moved)
                graph.erase_node(user)
    graph.erase_node(first)
    graph.erase_node(second)
