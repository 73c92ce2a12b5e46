"""Capture: retrace Dynamo's graph to ATen before dispatch, with in-place writes and SDPA kept whole and symbolic sizes.

``make_fx(pre_dispatch=True)`` under Dynamo's own fake mode keeps ``aten.scaled_dot_product_attention`` and every cache write as one node
each, however Python wrapped them. The result is not functional: the order of nodes matters, and ``graph.effects`` analyses it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.capture.combined import combine_behind
from kvcompile.passes.capture.flex import Stays
from kvcompile.passes.capture.in_place import write_in_place
from kvcompile.passes.capture.nested_joins import nest_joins
from kvcompile.passes.capture.prefix import join_prefixes
from kvcompile.passes.capture.retrace import Retrace
from kvcompile.passes.capture.stacked import join_stacked
from kvcompile.passes.capture.trace_cache import TraceCache
from kvcompile.passes.graph.dynamo import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TracingContext,
    detect_fake_mode,
)

log = logging.getLogger(__name__)

RUNTIME = str(Path(__file__).resolve().parents[2] / "runtime")


@dataclass(frozen=True)
class Input:
    """One input of the captured graph: its ATen node, and Dynamo's source name and placeholder for it.

    ``compressed``: a compressed cache was passed there. ``owned``: the tensor passed there owns its memory, and no view of it was alive.
    ``parameter``: a weak reference, for a parameter that Dynamo's graph had as an attribute; else None.
    """

    index: int
    node: fx.Node
    source: str
    compressed: bool
    placeholder: fx.Node = field(repr=False)
    owned: bool = True
    parameter: weakref.ref[torch.nn.Parameter] | None = field(default=None, repr=False)
    learned: bool = False
    """Whether an ``nn.Parameter`` was passed there: no call writes to it, so attention over it reads no cache."""
    returned: bool = False
    """Whether the tensor passed there was returned by an earlier compiled call."""


@dataclass(frozen=True)
class Captured:
    """The ATen graph, its inputs and their fake values, Dynamo's original graph and the fake mode."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    fakes: tuple[object, ...]
    origin: fx.GraphModule = field(repr=False)
    fake_mode: FakeTensorMode = field(repr=False)

    @property
    def graph(self) -> fx.Graph:
        """The ATen graph."""
        return self.module.graph


def _fake_mode(example_inputs: Sequence[object]) -> FakeTensorMode:
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    found = detect_fake_mode(example_inputs)
    return found if found is not None else FakeTensorMode(allow_non_fake_inputs=True)


def _static(mode: FakeTensorMode, value: torch.Tensor, fake: object) -> object:
    """Return ``fake`` if its sizes are integers, else a fake tensor with the sizes of ``value``, so that an attribute brings no symbols."""
    if isinstance(fake, torch.Tensor) and all(isinstance(size, int) for size in (*fake.shape, *fake.stride(), fake.storage_offset())):
        return fake
    with DisableTorchFunctionSubclass(), mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _fakify(mode: FakeTensorMode, value: object, compressed: bool) -> object:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    context = TracingContext.try_get()
    symbolic = None
    if context is not None:
        asked: Callable[[torch.Tensor], Any] = context.tensor_to_context.get
        symbolic = asked(value)
    source = symbolic.tensor_source if symbolic is not None else None
    with DisableTorchFunctionSubclass():
        if compressed:
            # A compressed cache is traced as the dense tensor that it represents: the real one has zero strides, which views in the model
            # do not expect.
            plain = value.as_subclass(torch.Tensor)
            seen = mode.from_tensor(plain, symbolic_context=symbolic, source=source)
            with mode:
                return torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
        return mode.from_tensor(value, symbolic_context=symbolic, source=source)


def _without_our_frames(trace: str) -> str:
    """Return a stack trace without the frames of our runtime, so that the model's line is the innermost."""
    mark = "  File "
    return mark.join(frame for frame in trace.split(mark) if not frame.startswith(f'"{RUNTIME}'))


def _parameter(value: object) -> weakref.ref[torch.nn.Parameter] | None:
    return weakref.ref(value) if isinstance(value, torch.nn.Parameter) else None


def _stays(node: fx.Node) -> bool:
    """Return whether dead-code elimination must keep an unread node: everything but ATen operators without side effects."""
    target = node.target
    return node.op != "call_function" or not isinstance(target, OpOverload) or target._schema.is_mutable or node.is_impure()


def _normalise(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Change the ATen graph in place to the form that the matcher reads.

    Cache writes are in place, concatenations and combined weights in their one known form, unread nodes erased, and stack traces without
    the frames of this package.
    """
    # An unread node must not count as a reader of scores or caches.
    module.graph.eliminate_dead_code(_stays)
    with mode:
        write_in_place(module.graph)
        module.graph.eliminate_dead_code(_stays)
        join_stacked(module.graph)
        nest_joins(module.graph)
        join_prefixes(module.graph)
        combine_behind(module.graph)
    module.graph.eliminate_dead_code(_stays)
    module.recompile()
    for node in module.graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _without_our_frames(node.meta["stack_trace"])


def capture(
    gm: fx.GraphModule, example_inputs: Sequence[object], is_compressed: Callable[[object], bool] = lambda value: False,
    owns_memory: Callable[[Any], bool] = lambda value: True, attributes: int = 0,
    is_returned: Callable[[object], bool] = lambda value: False,
) -> Captured:
    """Return Dynamo's graph ``gm`` retraced to ATen and normalised; errors of tracing pass through: the backend makes refusals of them.

    ``is_compressed``, ``owns_memory`` and ``is_returned`` give the facts of ``Input`` for an example input. The last ``attributes`` inputs
    were attributes of Dynamo's graph (``attributes.lifted``).
    """
    mode = _fake_mode(example_inputs)
    flags = [is_compressed(value) for value in example_inputs]
    owned = [
        flag or not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or owns_memory(value)
        for value, flag in zip(example_inputs, flags, strict=True)
    ]
    own: dict[int, Any] = dict(list(enumerate(example_inputs))[len(example_inputs) - attributes :])
    fakes = tuple(_fakify(mode, value, flag) for value, flag in zip(example_inputs, flags, strict=True))
    fakes = tuple(_static(mode, own[index], fake) if index in own else fake for index, fake in enumerate(fakes))

    def traced(spell_out: bool) -> fx.GraphModule:
        with mode:
            again = Retrace(gm, spell_out, TraceCache(mode))

            def run(*args: object) -> object:
                return again.run(*args, enable_io_processing=False)

            with fx.traceback.preserve_node_meta():
                return make_fx(run, pre_dispatch=True, tracing_mode="real", record_module_stack=False)(*fakes)

    try:
        module = traced(spell_out=True)
    except Stays:
        log.debug("flex attention stays as it is", exc_info=True)
        module = traced(spell_out=False)
    _normalise(module, mode)
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    inputs = []
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        source = getattr(placeholders[index], "_dynamo_source", None)
        name = source.name if source is not None else placeholders[index].name
        parameter = _parameter(own.get(index))
        name = name() if callable(name) else name
        learned = isinstance(example_inputs[index], torch.nn.Parameter)
        returned = is_returned(example_inputs[index])
        inputs.append(Input(index, node, name, flags[index], placeholders[index], owned[index], parameter, learned, returned))
        if "val" not in node.meta:
            node.meta["val"] = fakes[index]
    return Captured(module, tuple(inputs), fakes, gm, mode)
