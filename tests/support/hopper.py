"""Offline compilation of recorded launches for Hopper (sm_90); needs no GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcompile.lowering.host.launches import KernelLaunch

NAMES = {
    torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.float16: "fp16",
    torch.bfloat16: "bf16", torch.float32: "fp32",
}


def compiled_for_hopper(launch: KernelLaunch) -> Any:
    """Compile the kernel of one launch with its constants; tensors are stand-ins, and other arguments are int32."""
    constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else "*" + NAMES[item.dtype] if isinstance(item, torch.Tensor) else "i32"
        for name, item in launch.arguments.items()
    }
    given = {(at,): item for at, (name, item) in enumerate(launch.arguments.items()) if name in constants}
    return triton.compile(
        ASTSource(launch.kernel, signature, given), target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.warps},
    )
