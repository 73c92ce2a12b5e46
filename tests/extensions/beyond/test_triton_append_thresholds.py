"""The append kernel of thresholds in Triton's interpreter against the body it stands for, bit for bit, and compiled offline."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from test_triton_append import assert_same, fuse
from test_triton_append_rows import BATCH, KV, PAGES, positions, tokens

from kvcompile import schemes
from kvcompile.lowering.ops.operations import append_body
from kvcompile.types import Role, SlotSpec

CASES = (
    ("beyond", 128, torch.bfloat16), ("beyond(bits=2)", 64, torch.float16), ("beyond(bits=3,group=64)", 128, torch.float32),
    ("beyond(bits=5)", 64, torch.bfloat16), ("beyond(group=128)", 256, torch.float16), ("beyond(scale_dtype=float32)", 32, torch.float32),
)
"""Scheme, head dim, dtype. The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU."""


def thresholds(bits: int, groups: int, seed: int) -> torch.Tensor:
    """Thresholds of no even spacing, each head and group its own, in order, one twice and one below all values; [1, 1, K, groups, n]."""
    found = torch.rand(1, 1, KV, groups, 2**bits - 1, generator=torch.Generator().manual_seed(seed)) * (2**bits - 1)
    found[..., 0], found[..., 1] = -1.0, found[..., 2]
    return found.sort(-1).values


def stores(text: str, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The empty planes that new tokens are encoded into."""
    layout = schemes.parse(text).layout(SlotSpec(KV, dim, dtype, Role.KEY))
    return [torch.zeros(plane.shape(PAGES, BATCH, KV), dtype=plane.dtype) for plane in layout.planes[: layout.encoded]]


def compare() -> None:
    """Every plane, bit for bit, of uniform and of random thresholds, for one position of all rows and each row's own."""
    from kvcompile.extensions.beyond import threshold_rows as kernels
    from kvcompile.lowering.append.rows import launch

    fuse()
    for seed, (text, dim, dtype) in enumerate(CASES):
        scheme = schemes.parse(text)
        slot = SlotSpec(KV, dim, dtype, Role.KEY)
        spec = scheme.layout(slot).planes[-1]
        uniform = scheme.empty(spec, slot, 1, 1)
        for batch, table in ((1, uniform), (BATCH, thresholds(scheme.bits, spec.rows, seed))):  # type: ignore[attr-defined]
            x, pos = tokens(seed, dim, dtype), positions(batch)
            pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
            wanted, found = stores(text, dim, dtype), stores(text, dim, dtype)
            append_body(x, wanted, pos, scheme.spec(), None, [table])
            rows = kernels.ThresholdRows(x, found, pos, table, scheme.spec())
            assert kernels.fits(rows), text
            launch(kernels.append_thresholds, rows, None)
            assert_same(found, wanted, (text, dim, dtype, batch))


@pytest.mark.timeout(600)
def test_the_kernel_is_the_body_bit_for_bit() -> None:
    pytest.importorskip("triton")
    interpreted(compare)


@pytest.mark.parametrize(("scheme", "dim"), [("int4", 64), ("beyond", 80)])
def test_what_the_kernel_does_not_know(scheme: str, dim: int) -> None:
    pytest.importorskip("triton")
    from kvcompile.extensions.beyond.threshold_rows import ThresholdRows, fits

    planes, table = stores("beyond", dim, torch.bfloat16), thresholds(4, dim // 16, 0)
    assert not fits(ThresholdRows(tokens(0, dim, torch.bfloat16), planes, positions(1), table, scheme))


@pytest.mark.parametrize(("capability", "bits"), [(80, 4), (90, 2), (90, 3), (90, 4), (90, 5), (100, 4)])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_kernel_compiles_offline(capability: int, bits: int, rows: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.extensions.beyond.threshold_rows import append_thresholds

    rule = schemes.make("beyond", bits=bits).bins(128)
    assert rule is not None
    constants = dict(
        HEADS=8, PAGE=64, D=128, BITS=bits, PARTS=rule.parts, SEGMENTS=rule.segments, GROUP=rule.group, ULP=2.0**-10, TINY=2.0**-24,
        ROWS=rows, SKIP=0,
    )
    pointers = {"X": "*bf16", "CODES": "*u8", "SCALES": "*fp16", "ZEROS": "*fp16", "POS": "*i64", "TABLE": "*fp32"}
    names = append_thresholds.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(append_thresholds, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1 if rows == 1 else 4})
    assert compiled.asm["cubin"]
