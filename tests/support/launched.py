"""Runs launches of Gluon kernels without a device: each kernel is compiled for sm_90, and its PTX runs in numpy (``ptx``)."""

from __future__ import annotations

import functools
import struct
from typing import Any

import ptx
import torch
from hopper import compiled_for_hopper

from kvcompile.lowering.gluon.launch import Launch
from kvcompile.lowering.host.gluon_api import compile_for
from kvcompile.lowering.host.launches import KernelLaunch
from kvcompile.lowering.host.triton_api import POINTERS


def _type(argument: Any) -> str:
    """An argument's type as Triton's signature has it."""
    if isinstance(argument, torch.Tensor):
        return POINTERS[argument.dtype]
    return {int: "i32", float: "fp32"}.get(type(argument), "constexpr")


@functools.cache
def compiled(kernel: Any, types: tuple[str, ...], constants: tuple[tuple[str, Any], ...], warps: int) -> tuple[dict[str, Any], ptx.Program]:
    """What a kernel is compiled to, and its PTX as Python."""
    signature = dict(zip(kernel.arg_names, types, strict=True))
    made = compile_for(kernel, signature, dict(constants), {name for name, kind in signature.items() if kind.startswith("*")}, 90, warps)
    return made, ptx.translate(made["ptx"])


def compile_launch(launch: Launch) -> tuple[dict[str, Any], ptx.Program]:
    """What the kernel of a launch is compiled to, and its PTX as Python."""
    types = tuple(map(_type, launch.arguments))
    named = zip(launch.kernel.arg_names, launch.arguments, types, strict=True)
    return compiled(launch.kernel, types, tuple((name, item) for name, item, kind in named if kind == "constexpr"), launch.warps)


def argument(launch: Launch, name: str) -> Any:
    """An argument of a launch by its parameter's name."""
    return launch.arguments[launch.kernel.arg_names.index(name)]


def run_launch(launch: Launch) -> None:
    """Run all programs of a launch; tensors among its arguments hold afterwards what was written."""
    made, program = compile_launch(launch)
    given = {name: item for name, item in zip(launch.kernel.arg_names, launch.arguments, strict=True) if _type(item) != "constexpr"}
    _run(program, made["shared"], launch.warps, launch.grid, given)


def _run(program: ptx.Program, shared: int, warps: int, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
    """Run a grid with the arguments that are no constants; contiguous tensors among them hold afterwards what was written."""
    tensors = {name: item for name, item in given.items() if isinstance(item, torch.Tensor)}
    memory = ptx.Memory(tensors)
    bits = [
        memory.address(name) if name in tensors else struct.unpack("I", struct.pack("f", item))[0] if isinstance(item, float) else item
        for name, item in given.items()
    ]
    ptx.run(program, shared, warps, grid, memory, bits)
    for name, tensor in tensors.items():
        if tensor.is_contiguous():
            tensor.copy_(memory.read(name, tensor))


class OnPtx:
    """A launcher that runs Triton kernels as the PTX that they are on Hopper, in numpy."""

    cuda = True

    def kernel(self, kernel: Any, grid: tuple[Any, ...], *operands: Any, warps: int | None = None, **constants: Any) -> None:
        """Run all programs of a kernel; contiguous operands hold afterwards what was written."""
        arguments = {**dict(zip(kernel.arg_names, operands, strict=False)), **constants}
        launch = KernelLaunch(kernel, (*grid, 1, 1)[:3], {name: arguments[name] for name in kernel.arg_names}, warps or 4)
        made = compiled_for_hopper(launch, aligned=True)
        given = {name: item for name, item in launch.arguments.items() if name not in constants}
        _run(ptx.translate(made.asm["ptx"]), made.metadata.shared, warps or 4, launch.grid, given)

    def operator(self, target: Any, *operands: Any) -> None:
        """Run an operator."""
        target(*operands)
