"""Guards: let one compiled frame serve a cache tensor both before and after it is compressed.

Dynamo guards every tensor argument on its class, sizes and strides. A dense cache that the first call adopts becomes a handle, with
another class and other strides, so the second call would trace and guard the whole model again: five seconds at 32 layers. The
graph is the same either way (``lowering.graph_cache``), and the code that runs it checks the tensor itself. So the guard is replaced by one
that accepts the dense tensor that Dynamo saw, or a handle of the same shape, dtype and device.

This relies on one private fact: ``TracingContext.guards_context.dynamo_guards`` holds the guards that are built after the backend has
returned (torch 2.11 to 2.13). If that does not hold, the guards stay and a model is traced once more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, TracingContext, dispatch_keys
from kvcompile.runtime.handle.tensor import CompressedCache, face_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Expected:
    """The properties with which a cache tensor was traced: shape, dtype and device (``face``), and strides and dispatch keys when dense."""

    face: tuple[Any, ...]
    stride: tuple[int, ...]
    keys: Any

    @staticmethod
    def of(value: torch.Tensor) -> Expected:
        """Return the description of an argument of the traced call."""
        with DisableTorchFunctionSubclass():
            if isinstance(value, CompressedCache):
                dense = torch.empty(0, dtype=value.dtype, device=value.device)
                return Expected(value._face, torch.empty(value.shape, device="meta").stride(), dispatch_keys(dense))
            return Expected(face_of(value), value.stride(), dispatch_keys(value))

    def accepts(self, value: object) -> bool:
        """Return whether the graph may be called with ``value``."""
        if type(value) is CompressedCache:
            return bool(value._face == self.face)
        return (
            type(value) is torch.Tensor and face_of(value) == self.face and value.stride() == self.stride
            and not value.requires_grad and dispatch_keys(value) == self.keys
        )


def accept_handles(captured: Captured, examples: Collection[Any], arguments: Collection[int]) -> int:
    """Let the frame being compiled take ``arguments`` dense or compressed; return the number of replaced guards, 0 without a frame.

    ``examples``: the arguments of this call. Applies to tensors with static sizes only: Dynamo guards symbolic ones elsewhere.
    """
    context = TracingContext.try_get()
    if context is None:
        return 0
    wanted = {}
    for index, value in enumerate(examples):
        source = getattr(captured.inputs[index].placeholder, "_dynamo_source", None)
        fake = captured.fakes[index]
        plain = isinstance(fake, torch.Tensor) and all(isinstance(size, int) for size in (*fake.shape, *fake.stride()))
        if index in arguments and source is not None and plain and isinstance(value, torch.Tensor):
            wanted[source] = value
    replaced = 0
    for guard in context.guards_context.dynamo_guards:
        if guard.originating_source not in wanted:
            continue
        if guard.create_fn_name() == "TYPE_MATCH":
            guard.create_fn = _covered
        elif guard.create_fn_name() == "TENSOR_MATCH":
            guard.create_fn = functools.partial(_either, expected=Expected.of(wanted[guard.originating_source]))
            replaced += 1
    if replaced != len(wanted):
        log.debug("%d of %d cache tensors have a guard of Dynamo's own: the model will be traced once more", replaced, len(wanted))
    return replaced


def _covered(builder: Any, guard: Any) -> None:
    """Build no guard in place of a guard on the class of a cache tensor, since the guard that ``_either`` builds checks the class."""


def _either(builder: Any, guard: Any, expected: Expected) -> None:
    """Build a guard that accepts a cache either dense or compressed; Dynamo calls it in place of ``GuardBuilder.TENSOR_MATCH``."""
    manager = builder.get_guard_manager(guard)
    name = guard.name if isinstance(guard.name, str) else guard.name()
    builder.no_tensor_aliasing_names.append(name)
    builder.no_tensor_aliasing_guard_managers.append(manager)
    said = [f"{name} is a cache of {expected.face}, dense or compressed"]
    with contextlib.suppress(TypeError):
        manager.add_lambda_guard(expected.accepts, said, getattr(guard, "user_stack", None))
        return
    # torch 2.11 has no stack argument.
    manager.add_lambda_guard(expected.accepts, said)
