"""Names of Triton beyond its language that the lowering uses, each used only here. All exist in Triton 3.6 and 3.7.

    ``ASTSource``, ``GPUTarget``  compile a kernel for an architecture that this machine need not have
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch

POINTERS = {
    dtype: f"*{name}" for dtype, name in (
        (torch.bool, "i1"), (torch.uint8, "u8"), (torch.int8, "i8"), (torch.int32, "i32"), (torch.int64, "i64"), (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64"),
    )
}
"""Pointer types of Triton's signatures, by element dtype."""

KNOWN_LAYOUTS = ("3.6", "3.7")
"""Versions with which the PTX of tables was run (``tests/lowering/test_table_kernel.py``); it relies on how blocks are laid out."""


@functools.cache
def lays_out_as_known() -> bool:
    """Return whether this Triton version lays out blocks as the inline assembly assumes."""
    import triton

    return ".".join(triton.__version__.split(".")[:2]) in KNOWN_LAYOUTS


def compile_for(
    kernel: Any, signature: Mapping[str, str], aligned: Collection[str], capability: int, num_warps: int, num_stages: int
) -> dict[str, str | bytes]:
    """Return ``ttgir``, ``ptx`` and ``cubin`` of a kernel for a CUDA capability; needs no device.

    ``signature``: the type of each argument in order. ``aligned``: names of arguments that are multiples of 16.
    """
    made = built_for(kernel, signature, aligned, capability, num_warps, num_stages)
    return {stage: made.asm[stage] for stage in ("ttgir", "ptx", "cubin")}


def built_for(
    kernel: Any, signature: Mapping[str, str], aligned: Collection[str], capability: int, num_warps: int, num_stages: int
) -> Any:
    """Return Triton's compiled kernel, with ``asm`` and ``metadata``, for a CUDA capability; arguments as in ``compile_for``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name in aligned}
    return triton.compile(
        ASTSource(kernel, dict(signature), {}, attributes), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
