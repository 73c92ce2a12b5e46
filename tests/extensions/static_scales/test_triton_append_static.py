"""The append kernel of given scales in Triton's interpreter against the body it stands for, bit for bit, and compiled offline."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from static_scales import random_slot
from test_triton_append import assert_same, fuse
from test_triton_append_rows import BATCH, KV, PAGES, positions, tokens

from kvcompile import schemes
from kvcompile.lowering.ops.operations import append_body
from kvcompile.types import Role, SlotSpec

CASES = (
    ("int8-static", 128, torch.bfloat16), ("fp8-static", 64, torch.float16), ("int8-static", 80, torch.float32),
    ("fp8-static", 96, torch.bfloat16), ("fp8-static", 256, torch.float32),
)
"""Scheme, head dim, dtype: powers of two and others."""


def stores(text: str, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The empty plane of codes."""
    layout = schemes.parse(text).layout(SlotSpec(KV, dim, dtype, Role.KEY))
    return [torch.zeros(plane.shape(PAGES, BATCH, KV), dtype=plane.dtype) for plane in layout.planes[: layout.encoded]]


def scales(seed: int) -> torch.Tensor:
    """A scale for each head, of which one clips most and one next to nothing; [1, 1, K, 1, 1]."""
    found = random_slot(KV, seed, 3.0, 127.0).values.clone()
    found[0], found[-1] = 2.0**-9, 5.0
    return found[None, None, :, None, None]


def compare() -> None:
    """Every code, bit for bit, for one position of all rows and each row's own."""
    from kvcompile.extensions.static_scales import static_rows as kernels
    from kvcompile.lowering.append.rows import launch

    fuse()
    for seed, (text, dim, dtype) in enumerate(CASES):
        scheme, given = schemes.parse(text), scales(seed)
        for batch in (1, BATCH):
            x, pos = tokens(seed, dim, dtype), positions(batch)
            pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
            wanted, found = stores(text, dim, dtype), stores(text, dim, dtype)
            append_body(x, wanted, pos, scheme.spec(), None, [given])
            rows = kernels.StaticRows(x, found, pos, given, scheme.spec())
            assert kernels.fits(rows), text
            launch(kernels.append_static, rows, None)
            assert_same(found, wanted, (text, dim, dtype, batch))


@pytest.mark.timeout(600)
def test_the_kernel_is_the_body_bit_for_bit() -> None:
    pytest.importorskip("triton")
    interpreted(compare)


@pytest.mark.parametrize(("scheme", "changed"), [("int4", {}), ("int8-static", {"scales": torch.ones(1, 1, KV, 1, 1).half()})])
def test_what_the_kernel_does_not_know(scheme: str, changed: dict[str, torch.Tensor]) -> None:
    pytest.importorskip("triton")
    from kvcompile.extensions.static_scales.static_rows import StaticRows, fits

    rows = StaticRows(tokens(0, 64, torch.bfloat16), stores("int8-static", 64, torch.bfloat16), positions(1), scales(0), "int8-static")
    assert fits(rows) and not fits(rows._replace(scheme=scheme, **changed))


@pytest.mark.parametrize(("capability", "scheme", "converts"), [
    (80, "int8-static", 0), (80, "fp8-static", 0), (90, "int8-static", 0), (90, "fp8-static", 1), (100, "fp8-static", 1),
])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_kernel_compiles_offline(capability: int, scheme: str, converts: int, rows: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.extensions.static_scales.static_rows import append_static

    rule = schemes.parse(scheme).static(128)
    assert rule is not None
    constants = dict(HEADS=8, PAGE=64, D=128, E4M3=rule.e4m3 * (1 + converts), QMAX=rule.largest, ROWS=rows, COLUMNS=128, SKIP=0)
    pointers = {"X": "*bf16", "CODES": "*u8" if rule.e4m3 else "*i8", "POS": "*i64", "SCALES": "*fp32"}
    names = append_static.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(append_static, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1 if rows == 1 else 4})
    assert compiled.asm["cubin"]
