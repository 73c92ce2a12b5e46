"""Trace cache: a call that was already traced, on tensors of equal kind, is recorded from memory instead of traced again.

The layers of a model repeat the same calls on other tensors, and tracing one call takes a millisecond of dispatch. The nodes that a
pure call became are copied with the new operands. Their fake values are created anew, views as views of the new operands, so that
tests for shared memory give the same answers. Calls that write, have symbolic sizes or constants, or depend on anything outside the
key are traced as usual.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    in_kernel_invocation_manager,
    no_python_dispatcher,
    set_proxy_slot,
    shares_memory,
)

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))


class _Unknown(Exception):  # noqa: N818 - says that a call is not for the cache; never leaves this file
    """Raised for an operand or result that the cache cannot describe."""


@dataclass(frozen=True)
class _Ref:
    """A tensor of a call by index: an operand, or the result of an earlier node of the call."""

    operand: bool
    index: int


@dataclass(frozen=True)
class _Value:
    """Description of a node's fake value: sizes, dtype, device, and the tensor that it shares memory with (None: its own memory)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shares: _Ref | None


@dataclass(frozen=True)
class _Step:
    """One node to record; ``value``: a _Value, a list of them, or (for ``getitem``) an index into the previous node's list."""

    target: Any
    args: Any
    kwargs: Any
    name: str
    value: Any


@dataclass(frozen=True)
class _Recipe:
    """The recipe to repeat a traced call: the nodes that it recorded (``steps``), and its ``result`` in terms of operands and nodes.

    ``stands_for``: (operand's index, node) for each operand that the call returns; later reads of that operand read this node.
    """

    steps: tuple[_Step, ...]
    result: Any
    stands_for: tuple[tuple[int, _Ref], ...]


class TraceCache:
    """The traced calls of one trace; ``call`` runs a call, or records it from memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: dict[Any, _Recipe | None] = {}
        self.hits = 0

    def call(self, kind: str, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return the result of ``run()``, which calls ``target`` with ``args`` and ``kwargs``; while ``make_fx`` traces, keep its nodes.

        If an equal call was traced before, its nodes are copied and ``run`` is not called.
        """
        proxies = get_proxy_mode()
        if proxies is None or torch.is_grad_enabled():
            return run()
        operands: list[FakeTensor] = []
        tracer = proxies.tracer
        # Even reading a tensor's sizes is a traced call under the tracer's mode.
        with DisableTorchFunction():
            try:
                key = (kind, target, _key((args, kwargs), operands), _sharing(operands))
                recipe = self.known.get(key, False)
            except (_Unknown, TypeError):
                recipe = None
            nodes = [_node(tracer, tensor) for tensor in operands] if recipe is not None else [None]
            known = all(node is not None for node in nodes)
            if known and isinstance(recipe, _Recipe):
                self.hits += 1
                return self._write(tracer, recipe, operands)
            last = next(iter(reversed(tracer.graph.nodes)), None)
        result = run()
        if known:
            with DisableTorchFunction():
                try:
                    self.known[key] = _recipe(tracer, last, operands, nodes, result)
                except _Unknown:
                    self.known[key] = None
        return result

    def _write(self, tracer: Any, recipe: _Recipe, operands: Sequence[FakeTensor]) -> Any:
        values: list[Any] = []
        proxies: list[Any] = []
        given = [get_proxy_slot(tensor, tracer).proxy for tensor in operands]

        def tensor(ref: _Ref) -> Any:
            return operands[ref.index] if ref.operand else values[ref.index]

        def proxy(item: Any) -> Any:
            if isinstance(item, _Ref):
                return given[item.index] if item.operand else proxies[item.index]
            return item

        for step in recipe.steps:
            args, kwargs = _mapped(step.args, proxy), _mapped(step.kwargs, proxy)
            made = tracer.create_proxy("call_function", step.target, args, kwargs, name=step.name)
            if isinstance(step.value, int):
                value = values[step.args[0].index][step.value]
            elif isinstance(step.value, list):
                value = [self._fake(item, tensor) for item in step.value]
            else:
                value = self._fake(step.value, tensor)
            made.node.meta["val"] = [self._snapshot(item) for item in value] if isinstance(value, list) else self._snapshot(value)
            if isinstance(value, FakeTensor):
                set_proxy_slot(value, tracer, ProxyTensor(made, None))
            values.append(value)
            proxies.append(made)
        for index, ref in recipe.stands_for:
            set_proxy_slot(operands[index], tracer, ProxyTensor(proxies[ref.index], None))
        return _mapped(recipe.result, lambda item: tensor(item) if isinstance(item, _Ref) else item)

    def _fake(self, value: _Value, tensor: Callable[[_Ref], Any]) -> FakeTensor:
        with no_python_dispatcher(), in_kernel_invocation_manager(self.mode):
            if value.shares is not None:
                made = torch.ops.aten.as_strided.default(tensor(value.shares), value.shape, value.stride, value.offset)
            else:
                made = torch.ops.aten.empty_strided.default(value.shape, value.stride, dtype=value.dtype, device=torch.device("meta"))
        return FakeTensor(self.mode, made, value.device)

    def _snapshot(self, value: FakeTensor) -> FakeTensor:
        """Return an alias of ``value`` that keeps its present sizes; later in-place operations may change the sizes of ``value`` itself."""
        with no_python_dispatcher(), in_kernel_invocation_manager(self.mode):
            made = torch.ops.aten.detach.default(value)
        return FakeTensor(self.mode, made, value.device)


def _key(item: Any, operands: list[FakeTensor]) -> Any:
    """Return a hashable key of all facts of ``item`` that tracing can depend on; appends fake tensors to ``operands``.

    Raises _Unknown for symbolic sizes and for types that are not described.
    """
    kind = type(item)
    if kind is FakeTensor:
        for index, known in enumerate(operands):
            if known is item:
                return "again", index
        operands.append(item)
        sizes = (*item.shape, *item.stride(), item.storage_offset())
        if not all(type(size) is int for size in sizes):
            raise _Unknown
        # Gradients are off, so ``requires_grad`` of an operand does not change the result.
        return "tensor", item.dtype, item.device, item.requires_grad, len(item.shape), sizes
    if kind in PLAIN:
        return kind, item
    if kind is slice:
        return "slice", _key(item.start, operands), _key(item.stop, operands), _key(item.step, operands)
    if isinstance(item, (tuple, list)):
        return kind, tuple(_key(part, operands) for part in item)
    if isinstance(item, dict):
        return tuple((name, _key(part, operands)) for name, part in item.items())
    raise _Unknown


def _sharing(operands: Sequence[FakeTensor]) -> tuple[int, ...]:
    """Return for each operand the index of the first operand that it shares memory with (its own index if none)."""
    return tuple(
        next(other for other in range(index + 1) if other == index or _aliased(operands[other], tensor))
        for index, tensor in enumerate(operands)
    )


def _aliased(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(shares_memory(a, b))


def _node(tracer: Any, tensor: FakeTensor) -> fx.Node | None:
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _recipe(tracer: Any, last: fx.Node | None, operands: Sequence[FakeTensor], nodes: Sequence[Any], result: Any) -> _Recipe:
    """Return the recipe of a call that was just traced: the nodes recorded after ``last``. Raises _Unknown if it cannot be repeated."""
    new: list[fx.Node] = []
    for node in reversed(tracer.graph.nodes):
        if node is last:
            break
        new.insert(0, node)
    place = {node: _Ref(True, index) for index, node in reversed(list(enumerate(nodes)))}
    fakes: list[tuple[_Ref, torch.Tensor]] = [(_Ref(True, index), tensor) for index, tensor in enumerate(operands)]
    steps = []
    for index, node in enumerate(new):
        steps.append(_step(node, place, fakes))
        place[node] = _Ref(False, index)
        if isinstance(node.meta["val"], torch.Tensor):
            fakes.append((place[node], node.meta["val"]))
    now = [(index, _node(tracer, tensor)) for index, tensor in enumerate(operands)]
    if any(node not in place for _, node in now):
        raise _Unknown
    stands_for = tuple((index, place[node]) for index, node in now if node is not nodes[index])
    return _Recipe(tuple(steps), _mapped(result, lambda item: _result(tracer, item, operands, place)), stands_for)


def _step(node: fx.Node, place: dict[fx.Node, _Ref], fakes: list[tuple[_Ref, torch.Tensor]]) -> _Step:
    def ref(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if item not in place:
                raise _Unknown
            return place[item]
        if type(item) not in PLAIN and type(item) is not slice:
            raise _Unknown
        return item

    value = node.meta.get("val")
    pure = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
    if node.op != "call_function" or not (pure or node.target is operator.getitem) or value is None:
        raise _Unknown
    args, kwargs = _mapped(node.args, ref), _mapped(node.kwargs, ref)
    if node.target is operator.getitem:
        if not isinstance(args[0], _Ref) or args[0].operand or not isinstance(args[1], int):
            raise _Unknown
        described: Any = args[1]
    elif isinstance(value, (list, tuple)):
        described = [_described(item, fakes) for item in value]
    else:
        described = _described(value, fakes)
    name = node.graph._target_to_str(getattr(node.target, "overloadpacket", node.target).__name__)  # type: ignore[union-attr]
    return _Step(node.target, args, kwargs, name, described)


def _described(value: Any, fakes: Sequence[tuple[_Ref, torch.Tensor]]) -> _Value:
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if type(value) is FakeTensor else (None,)
    if not all(type(size) is int for size in sizes):
        raise _Unknown
    shares = next((ref for ref, tensor in fakes if _aliased(tensor, value)), None)
    same = shares is None or next(tensor for ref, tensor in fakes if ref == shares).dtype == value.dtype
    if not same:
        raise _Unknown
    return _Value(tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, shares)


def _result(tracer: Any, item: Any, operands: Sequence[FakeTensor], place: dict[fx.Node, _Ref]) -> Any:
    """Return one leaf of the call's result as a reference to an operand or node, or as a constant. Raises _Unknown otherwise."""
    if not isinstance(item, torch.Tensor):
        if type(item) not in PLAIN:
            raise _Unknown
        return item
    for index, tensor in enumerate(operands):
        if tensor is item:
            return _Ref(True, index)
    node = _node(tracer, item) if type(item) is FakeTensor else None
    if node is None or node not in place or place[node].operand:
        raise _Unknown
    return place[node]


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest of tuples, lists, dicts and slices with ``change`` applied to its leaves."""
    if isinstance(item, (tuple, list)):
        parts = [_mapped(part, change) for part in item]
        return tuple(parts) if isinstance(item, tuple) else parts
    if isinstance(item, dict):
        return {name: _mapped(part, change) for name, part in item.items()}
    if type(item) is slice:
        return slice(_mapped(item.start, change), _mapped(item.stop, change), _mapped(item.step, change))
    return change(item)
