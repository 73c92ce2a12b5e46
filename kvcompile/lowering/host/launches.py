"""How the kernels of an operator are started: at once, or as steps of a compiled graph.

A function that starts kernels takes a launcher. ``Direct`` runs each kernel where it stands. ``Recorder`` runs none: it keeps every
launch as a value, with stand-ins (fake tensors) for tensors, so that a lowering can put the same launches into Inductor's module
(``launch_node``) and a test can read which operands each kernel writes. The function itself does not know which of both it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcompile.errors import CompileError
from kvcompile.lowering.host.torch_api import TorchDispatchMode


class NotRecorded(CompileError):
    """A function that only starts kernels computed a tensor otherwise, or gave a kernel a view."""

    template = (
        "expected kernels of operands and of empty tensors, found {found}; what is computed between kernels is an operator of its own,"
        " and kernels take whole tensors with their strides"
    )


class Launcher(Protocol):
    """Starts kernels and, between them, operators that write into their operands."""

    @property
    def cuda(self) -> bool:
        """Whether kernels are compiled for CUDA; elsewhere Triton's interpreter runs them."""

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Start a Triton kernel; None leaves the number of warps to Triton."""

    def operator(self, target: Any, *operands: Any) -> None:
        """Call an operator that returns nothing."""


@dataclass(frozen=True)
class Direct:
    """Starts kernels and operators at once."""

    cuda: bool

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Run a kernel, with ``warps`` where it is compiled."""
        if self.cuda and warps is not None:
            constants["num_warps"] = warps
        kernel[grid](*operands, **constants)

    def operator(self, target: Any, *operands: Any) -> None:
        """Run an operator."""
        target(*operands)


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: ``arguments`` by the kernel's parameter names, constants among them."""

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
    """One call of an operator that returns nothing."""

    target: Any
    operands: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Operands that are tensors."""
        return [item for item in self.operands if isinstance(item, torch.Tensor)]


Step = KernelLaunch | OperatorCall


class Recorder:
    """Keeps kernels and operators as steps, in order; the tensors that it is given are stand-ins."""

    cuda = True

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Keep a launch."""
        names = list(kernel.arg_names)
        arguments = {**dict(zip(names, operands, strict=False)), **constants}
        assert set(arguments) == set(names), set(names) ^ set(arguments)
        self.steps.append(KernelLaunch(kernel, (*grid, 1, 1)[:3], {name: arguments[name] for name in names}, warps))

    def operator(self, target: Any, *operands: Any) -> None:
        """Keep a call."""
        self.steps.append(OperatorCall(target, operands))


def identity(tensor: torch.Tensor) -> int:
    """Return a key that stand-ins share only if they share memory: empty tensors of a mode arrive wrapped anew each time."""
    return int(tensor.untyped_storage()._cdata)


class OnlyRoom(TorchDispatchMode):
    """Lets a recorded function make empty tensors and views, whose strides it may ask for; refuses everything that computes."""

    EMPTY, ASKED = ("aten::empty", "aten::new_empty"), "prim::"

    def __init__(self) -> None:
        super().__init__()
        self.room: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an allocation or a view; raises NotRecorded."""
        name, empty = func._schema.name, func._schema.name.startswith(self.EMPTY)
        if not func.is_view and not empty and not name.startswith(self.ASKED):
            raise NotRecorded(found=name)
        made = func(*args, **(kwargs or {}))
        if empty:
            self.room.append(made)
        return made
