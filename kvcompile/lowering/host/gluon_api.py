"""Names of Triton's experimental language Gluon that the lowering uses, each imported only here. All exist in Triton 3.6 and 3.7.

    ``gluon``, ``gl``         the decorators and the language: Triton with layouts that the program chooses
    ``mma_v2``, ``async_copy``  the matrix product of a warp's fragments, and copies into shared memory
    ``barrier``               waits for all threads of a program; ``thread_barrier`` in 3.6
    ``GluonASTSource``        compiles a kernel for an architecture that this machine need not have

Importing this module imports Triton; ``lowering.gluon.eligibility.available`` tells without an import whether Triton has Gluon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = ["async_copy", "barrier", "compile_for", "gl", "gluon", "mma_v2"]

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], aligned: Collection[str], capability: int, num_warps: int
) -> dict[str, Any]:
    """Return ``ttgir``, ``ptx``, ``cubin`` and the ``shared`` bytes of a Gluon kernel for a CUDA capability; needs no device.

    ``signature``: the type of each argument in order, ``constexpr`` for those in ``constants``. ``aligned``: names of arguments that are
    multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name in aligned}
    source = GluonASTSource(kernel, dict(signature), dict(constants), attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    return {**{stage: made.asm[stage] for stage in ("ttgir", "ptx", "cubin")}, "shared": made.metadata.shared}
