"""Names of Triton beyond its language that the lowering uses, each once. All were seen in Triton 3.6 and 3.7.

    ``ASTSource``, ``GPUTarget``  compile a kernel for an architecture that this machine need not have
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def compile_for(
    kernel: Any, signature: Mapping[str, str], aligned: Collection[str], capability: int, num_warps: int, num_stages: int
) -> dict[str, str | bytes]:
    """``ttgir``, ``ptx`` and ``cubin`` of a kernel for a CUDA capability, on a machine with or without a device.

    ``signature``: the type of each argument, in their order. ``aligned``: those that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name in aligned}
    made = triton.compile(
        ASTSource(kernel, dict(signature), {}, attributes), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    return {stage: made.asm[stage] for stage in ("ttgir", "ptx", "cubin")}
