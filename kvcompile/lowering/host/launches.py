"""Launchers: start the kernels of an operator immediately, or record them as steps of a compiled graph.

A function that starts kernels takes a launcher. ``Direct`` runs each kernel when it is called. ``Recorder`` runs none: it keeps every
launch as a value, with fake tensors for tensors, so that a lowering can put the same launches into Inductor's module (``launch_node``) and
a test can check the operands that each kernel writes. The function itself cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcompile.errors import CompileError
from kvcompile.lowering.host.torch_api import TorchDispatchMode


class NotRecorded(CompileError):
    """A function that may only start kernels computed a tensor in another way, or passed a view to a kernel."""

    template = (
        "expected kernels of operands and of empty tensors, found {found}; what is computed between kernels is an operator of its own,"
        " and kernels take whole tensors with their strides"
    )


class Launcher(Protocol):
    """Interface of launchers: they start a function's Triton kernels and, between these, operators that only write into their operands."""

    @property
    def cuda(self) -> bool:
        """Whether kernels are compiled for CUDA; otherwise Triton's interpreter runs them."""

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Start a Triton kernel on ``grid``, its compile-time arguments by name; ``warps``: None leaves the number to Triton."""

    def operator(self, target: Any, *operands: Any) -> None:
        """Call the operator ``target``, which writes into ``operands`` and returns nothing."""


@dataclass(frozen=True)
class Direct:
    """A launcher that runs each kernel and operator immediately."""

    cuda: bool

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Run a kernel; the interpreter ignores ``warps``."""
        if self.cuda and warps is not None:
            constants["num_warps"] = warps
        kernel[grid](*operands, **constants)

    def operator(self, target: Any, *operands: Any) -> None:
        """Call the operator ``target`` on ``operands`` immediately."""
        target(*operands)


@dataclass(frozen=True)
class KernelLaunch:
    """One recorded launch: kernel, grid, ``arguments`` by parameter name (constants included), and warps, None for Triton's default."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    warps: int | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Arguments that are tensors."""
        return [item for item in self.arguments.values() if isinstance(item, torch.Tensor)]


@dataclass(frozen=True)
class OperatorCall:
    """One recorded call of an operator that returns nothing."""

    target: Any
    operands: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Operands that are tensors."""
        return [item for item in self.operands if isinstance(item, torch.Tensor)]


Step = KernelLaunch | OperatorCall


class Recorder:
    """A launcher that records kernels and operators as steps, in order, and runs none; its tensors are fake tensors."""

    cuda = True

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Record a kernel launch with its arguments by name, without running it."""
        names = list(kernel.arg_names)
        arguments = {**dict(zip(names, operands, strict=False)), **constants}
        assert set(arguments) == set(names), set(names) ^ set(arguments)
        self.steps.append(KernelLaunch(kernel, (*grid, 1, 1)[:3], {name: arguments[name] for name in names}, warps))

    def operator(self, target: Any, *operands: Any) -> None:
        """Record a call of an operator, without running it."""
        self.steps.append(OperatorCall(target, operands))


def identity(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors with one storage.

    Tensor objects cannot be compared instead, since a dispatch mode wraps one tensor several times.
    """
    return int(tensor.untyped_storage()._cdata)


class OnlyRoom(TorchDispatchMode):
    """A dispatch mode in which functions may allocate empty tensors, take views and ask for strides, but compute nothing.

    Any other operator raises NotRecorded. ``room``: the tensors that were allocated.
    """

    EMPTY, ASKED = ("aten::empty", "aten::new_empty"), "prim::"

    def __init__(self) -> None:
        super().__init__()
        self.room: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an allocation, a view or a query, and return its result; append an allocated tensor to ``room``.

        Raises NotRecorded for any other operator.
        """
        name, empty = func._schema.name, func._schema.name.startswith(self.EMPTY)
        if not func.is_view and not empty and not name.startswith(self.ASKED):
            raise NotRecorded(found=name)
        made = func(*args, **(kwargs or {}))
        if empty:
            self.room.append(made)
        return made
