"""The append kernel of many tokens in Triton's interpreter against the body it stands for, bit for bit, and compiled offline."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from registry import PLAIN
from test_triton_append import assert_same, fuse, one_nan

from kvcompile import schemes
from kvcompile.lowering.ops.operations import append_body
from kvcompile.types import Role, SlotSpec

CONSTANTS = {
    "int8": dict(WIDTH=128, PARTS=1, BITS=8, GROUP=128, E4M3=0, QMAX=127.0, ROWS=32, UNITS=1, UNIT=128),
    "int4": dict(WIDTH=64, PARTS=2, BITS=4, GROUP=32, E4M3=0, QMAX=7.0, ROWS=64, UNITS=2, UNIT=32),
    "fp8": dict(WIDTH=80, PARTS=1, BITS=8, GROUP=80, E4M3=1, QMAX=448.0, ROWS=32, UNITS=1, UNIT=128),
    "fp8 by the device": dict(WIDTH=128, PARTS=1, BITS=8, GROUP=128, E4M3=2, QMAX=448.0, ROWS=32, UNITS=1, UNIT=128),
}
COMMON = dict(HEADS=8, PAGE=64, ULP=2.0**-10, TINY=2.0**-24)
POINTERS = {"X": "*bf16", "SCALES": "*fp16", "POS": "*i64"}

# Scheme, head dim, dtype. The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
CASES = (
    ("int8", 128, torch.bfloat16), ("int4", 128, torch.bfloat16), ("fp8", 128, torch.bfloat16), ("int8", 80, torch.float16),
    ("int4(group=8)", 80, torch.float32), ("fp8", 96, torch.float32), ("int4(group=16)", 96, torch.float16), ("int8", 256, torch.float32),
    ("int4", 256, torch.bfloat16), ("int8(granularity=group,group=16)", 80, torch.bfloat16),
    ("fp8(scale_dtype=float32)", 64, torch.float16),
    ("int4(scale_dtype=float32)", 64, torch.float32),
)
KV, BATCH, COUNT, PAGES = 3, 2, 77, 2
NAMED = {text.partition("(")[0] for text, _, _ in CASES}
OTHERS = tuple((kind.name, 128, torch.bfloat16) for kind in PLAIN if kind.name not in NAMED and kind().absmax(128) is not None)
"""Registered schemes that let the kernel encode and have no case of their own."""


def tokens(seed: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, K, S, D] as projections lay them, [B, S, K, D], with ties, zeros, tiny and huge groups, NaN and infinities."""
    x = torch.randn(BATCH, COUNT, KV, dim, generator=torch.Generator().manual_seed(seed)) * 3
    x[0, 1] = (torch.arange(dim) % 15 - 7) / 2 * 0.25
    x[0, 1, :, ::8] = 127 / 4
    x[0, 2] = 0
    x[0, 3] = -0.0
    x[0, 4] *= 2.0**-22
    x[0, 5] *= 2.0**-120
    x[0, 6] *= 2.0**12
    x[1, 7, 1, 3] = float("nan")
    x[1, 8, 2, 5] = float("inf")
    x[1, 9, 0, 6] = -float("inf")
    x[1, 10] *= 2.0**100
    x[1, 11, :, ::2] *= 2.0**-9
    return x.to(dtype).transpose(1, 2)


def positions(batch: int) -> torch.Tensor:
    """Consecutive ones that end behind the store's last token; of two rows, the second begins later, and holes in no order."""
    pos = torch.arange(COUNT).unsqueeze(0) + PAGES * 64 - COUNT + 2
    if batch == 1:
        return pos
    other = torch.randperm(PAGES * 64, generator=torch.Generator().manual_seed(7))[:COUNT]
    other[3], other[5] = -1, 1 << 40
    return torch.stack([pos[0], other[: pos.shape[1]]])


def stores(text: str, dim: int, dtype: torch.dtype, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Empty planes of keys and values."""
    layouts = [schemes.parse(text).for_role(role).layout(SlotSpec(KV, dim, dtype, role)) for role in Role]
    return [[torch.zeros(plane.shape(PAGES, BATCH, KV), dtype=plane.dtype, device=device) for plane in layout.planes] for layout in layouts]


def compare(cases: tuple[tuple[str, int, torch.dtype], ...]) -> None:
    """Every plane of both slots, bit for bit, for one position of all rows or each row's own; both for the first of every word."""
    from kvcompile.lowering.append import rows as kernels

    fuse()
    for seed, (text, dim, dtype) in enumerate(cases):
        scheme = schemes.parse(text).spec()
        new = [tokens(2 * seed + index, dim, dtype) for index in range(2)]
        for batch in (1, BATCH) if seed < 3 else (1 + seed % BATCH,):
            pos = positions(batch)
            # The last row takes the poison alone: the order of several writes of one place is nobody's.
            pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
            wanted, found = stores(text, dim, dtype), stores(text, dim, dtype)
            for x, planes in zip(new, wanted, strict=True):
                append_body(x, planes, pos, scheme)
            slots = [kernels.Rows(x, planes, pos, scheme) for x, planes in zip(new, found, strict=True)]
            assert all(kernels.fits(slot) for slot in slots), text
            kernels.append_rows(slots)
            for mine, body in zip(found, wanted, strict=True):
                assert_same(one_nan(mine, text), one_nan(body, text), (text, dim, dtype, batch))
            if batch == 1:
                alone = stores(text, dim, dtype)[0]
                kernels.append_rows([slots[0]._replace(planes=alone)])
                assert_same(alone, found[0], (text, dim, dtype, "alone"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [CASES, *((case,) for case in OTHERS)], ids=lambda cases: cases[0][0] if len(cases) == 1 else "named")
def test_the_kernel_is_the_body_bit_for_bit(cases: tuple[tuple[str, int, torch.dtype], ...]) -> None:
    pytest.importorskip("triton")
    interpreted(compare, cases)


@pytest.mark.parametrize("scheme", ["dense", "kivi", "int8(granularity=tensor)", "int4(granularity=token)"])
def test_what_the_kernel_does_not_know(scheme: str) -> None:
    pytest.importorskip("triton")
    from kvcompile.lowering.append.rows import Rows, fits

    planes = stores(scheme, 64, torch.bfloat16)[0]
    x = tokens(0, 64, torch.bfloat16)
    assert not fits(Rows(x, planes, positions(1), scheme))


# Nibbles and 80 channels have every feature between them; before capability 89 devices have no conversion to e4m3.
@pytest.mark.parametrize(("capability", "scheme"), [
    *((90, scheme) for scheme in CONSTANTS), (80, "int4"), (80, "fp8"), (100, "int4"), (100, "fp8 by the device"),
])
def test_the_kernel_compiles_offline(capability: int, scheme: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.append.rows import APPEND_ROWS

    own = {**COMMON, **CONSTANTS[scheme]}
    constants = {**own, **{f"{name}_2": value for name, value in own.items()}}
    pointers = {**POINTERS, "CODES": "*i8" if scheme == "int8" else "*u8"}
    names = APPEND_ROWS.two.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name.removesuffix("_2"), "i32") for name in names}
    source = ASTSource(APPEND_ROWS.two, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
