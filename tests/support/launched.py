"""Runs launches of Gluon kernels without a device: each kernel is compiled for sm_90, and its PTX runs in numpy (``ptx``)."""

from __future__ import annotations

import functools
import struct
from typing import Any

import ptx
import torch

from kvcompile.lowering.gluon.launch import Launch
from kvcompile.lowering.host.gluon_api import compile_for

POINTERS = {
    torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


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


def run_launch(launch: Launch) -> None:
    """Run all programs of a launch; tensors among its arguments hold afterwards what was written."""
    made, program = compile_launch(launch)
    tensors = {name: item for name, item in zip(launch.kernel.arg_names, launch.arguments, strict=True) if isinstance(item, torch.Tensor)}
    memory = ptx.Memory(tensors)
    bits = []
    for name, item in zip(launch.kernel.arg_names, launch.arguments, strict=True):
        if name in tensors:
            bits.append(memory.address(name))
        elif isinstance(item, float):
            bits.append(struct.unpack("I", struct.pack("f", item))[0])
        elif type(item) is int:
            bits.append(item)
    ptx.run(program, made["shared"], launch.warps, launch.grid, memory, bits)
    for name, tensor in tensors.items():
        if tensor.is_contiguous():
            tensor.copy_(memory.read(name, tensor))
