"""The append kernel in Triton's interpreter against the body it stands for, bit for bit, and compiled offline.

The interpreter must be chosen before triton is imported, so the comparison runs in a subprocess of this very file.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvcompile import schemes
from kvcompile.lowering import windows
from kvcompile.types import Role, SlotSpec

KV, DIM = 2, 64
CONSTANTS = {
    "D": 128, "W": 32, "PAGE": 64, "HEADS": 8, "BITS": 2, "PARTS": 4, "SEGMENTS": 1, "GROUP": 32, "HAS_ORIGIN": True, "EXACT": False,
    "ULP": 2.0**-10, "TINY": 2.0**-24,
}
POINTERS = {
    "X": "*bf16", "RING": "*bf16", "CLOCK": "*i64", "CODES": "*u8", "SCALES": "*fp16", "ZEROS": "*fp16", "POS": "*i64", "ORIGIN": "*i64",
    "RECENT": "*bf16",
}


def compare() -> None:
    """Three single tokens across a block's end behind a filled window: every plane and result, bit for bit."""
    from kvcompile.lowering import triton_append

    # The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
    spelled = ("kivi", "kivi(bits=3)", "kivi(bits=4,group=16,scale_dtype=float32)")
    for index, (text, role) in enumerate((text, role) for text in spelled for role in Role):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index // 2]
        scheme = schemes.parse(text).of(role)
        layout = scheme.layout(SlotSpec(KV, DIM, dtype, role))
        before = scheme.window + scheme.group - 1
        x = torch.randn(2, KV, before + 3, DIM, generator=torch.Generator().manual_seed(index)) * 3 + torch.arange(DIM)
        x[0, 0, -2] = 0
        x[1, 1, -1, 5] = float("nan")
        x = x.to(dtype)
        for origin in (None, torch.tensor([0, 3])):
            body = [torch.zeros(plane.shape(3, 2, KV), dtype=plane.dtype) for plane in layout.planes]
            windows.append_window_body(x[:, :, :before], body, torch.arange(before).unsqueeze(0), origin, scheme.spell())
            kernel = [plane.clone() for plane in body]
            for at in range(before, before + 3):
                pos = torch.tensor([[at]])
                wanted = windows.append_window_body(x[:, :, at : at + 1], body, pos, origin, scheme.spell())
                assert triton_append.fits(x[:, :, at : at + 1], kernel, scheme.spell())
                found = triton_append.append_window_one(x[:, :, at : at + 1], kernel, pos, origin, scheme.spell())
                for a, b in zip((*body, *wanted), (*kernel, *found), strict=True):
                    assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), (scheme.spell(), dtype, at, tuple(a.shape))
                    assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.timeout(600)
def test_the_kernel_is_the_body_bit_for_bit() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("block", [32, 1])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_offline(capability: int, block: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.triton_append import append_one

    names, constants = append_one.arg_names, {**CONSTANTS, "BLOCK": block}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    source = ASTSource(append_one, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]


if __name__ == "__main__":
    compare()
