"""How appends stand in a graph that is compiled: as their bodies, or on CUDA as kernels, keys and values in one launch where they can.

``append``         ``rows``, one token or many: the body is some forty nodes a slot, half of what a layer of a decode step
                   has, and becomes four kernels where this is one launch for keys and values. The kernel of a scheme's own where it
                   encodes by a constant plane, thresholds or scales (``Scheme.append_kernel``), a launch a slot.
``append_window``  one token: ``window_token`` or the kernel of a scheme's own plugin; more: ``window_blocks``, or else the operation as it
                   is.

What else the kernels do not know is the body's. Many tokens into a window are not traced even there: encoding with calibrated
planes is hundreds of nodes a layer, for which a model of 32 layers compiled above five minutes, and a prefill runs once.
Two appends are one call where nothing between them could tell: ``pair``.
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
"""Operands of ``append`` with thresholds or given scales, of ``append_window`` without them; the kernels of windows know neither."""

Appended = tuple[torch.Tensor, torch.Tensor] | None


def append_traced(*operands: Any) -> None:
    """``append`` in a compiled graph."""
    _rows([operands])


def append_window_traced(*operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``append_window`` in a compiled graph."""
    return _windows([operands])[0]


def append_both(*operands: Any) -> None:
    """Two ``append`` in a compiled graph, the operands of one behind those of the other."""
    _rows(_halves(operands))


def append_window_both(*operands: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two ``append_window`` in a compiled graph, the operands of one behind those of the other."""
    return _windows(_halves(operands))


def _halves(operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The operands of two calls that have as many each."""
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

        # The kernels know no padding: what shares scales among tokens is the body's anyway.
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
    """One ``append``, by the kernel that its scheme brings for its constant plane where that knows the call, else by its body."""
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
    """The results of ``append_window`` of one slot or two that the kernels know."""
    # The clock is read before it moves on.
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
    """Make one call of two appends of one operation, where the first may as well happen when the second does.

    That is where nothing that stands between them uses the first one's results or planes, or changes anything in place.
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
            # A reader of results is moved along; whoever reads further, or reads the planes, ends what may be paired.
            earlier = {target: first for target, first in earlier.items() if not _uses(node, first) or _is_result(node, first)}
    graph.lint()


def _defer(node: fx.Node) -> None:
    """Move the operation that keeps first tokens, with the slice that it alone takes, behind appends of ours that follow it.

    It writes planes of its own: an append may as well come before, but nothing that reads them or changes anything else in place.
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
    """Whether a node reads what an append gives, or one of its planes."""
    made = {first, *first.users, *(first.args[1])}  # type: ignore[misc]
    return any(item in made for item in node.all_input_nodes)


def _changes(node: fx.Node) -> bool:
    """Whether a node may change memory that is not its own."""
    if getattr(node.target, "__module__", None) in {"_operator", "math"}:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether two appends have all operands in the same places, none by name."""
    return not first.kwargs and not second.kwargs and len(first.args) == len(second.args)


def _join(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """One call in the second one's place, and its results for theirs."""
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
