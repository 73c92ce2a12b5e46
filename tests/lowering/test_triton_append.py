"""The append kernel in Triton's interpreter against the body it stands for, bit for bit, and compiled offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from interpreted import interpreted
from registry import SCHEMES

from kvcompile import schemes
from kvcompile.lowering.ops import append_window as windows
from kvcompile.schemes import Scheme
from kvcompile.types import Role, SlotSpec

KV, DIM = 2, 64
CONSTANTS = {
    "D": 128, "W": 32, "PAGE": 64, "HEADS": 8, "BITS": 2, "PARTS": 4, "SEGMENTS": 1, "GROUP": 32, "SUB": 0, "QMAX": 0.0, "E4M3": 0,
    "HAS_ORIGIN": True, "ULP": 2.0**-10, "TINY": 2.0**-24,
}
POINTERS = {
    "X": "*bf16", "RING": "*bf16", "CLOCK": "*i64", "CODES": "*u8", "SCALES": "*fp16", "ZEROS": "*fp16", "OWN": "*fp16", "POS": "*i64",
    "ORIGIN": "*i64", "RECENT": "*bf16",
}


def fuse() -> None:
    """Make the interpreter's fma what the instruction is: rounded once. The product of two float32 is exact in float64."""
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self: object, x: Any, y: Any, z: Any) -> Any:
        del self
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(x.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def assert_same(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], what: object) -> None:
    """Bit for bit, but for what a NaN is made of."""
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), (what, tuple(a.shape), int((a.nan_to_num(7) != b.nan_to_num(7)).sum()))
        assert torch.equal(a.isnan(), b.isnan()), what


def one_nan(planes: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """The planes with one code of NaN for both of e4m3's: the sign of a NaN is the processor's."""
    codes, *others = planes
    return [torch.where((codes & 127) == 127, 127, codes) if text.startswith("fp8") else codes, *others]


# The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
SPELLED = (
    "kivi", "kivi(bits=3)", "kivi(bits=4,group=16,scale_dtype=float32)", "kivi(window=64)", "kivi(bits=4)", "normed", "normed(bits=3)",
    "normed(bits=4,scale_dtype=float32,turn=both)", "kivi(group=64)",
)
SYMMETRIC = (
    "int4(window=32)", "int8(window=16)", "fp8(window=32)", "int4(window=8,group=16,scale_dtype=float32)",
    "int4(window=64,granularity=token)",
)


def token_kernel_knows(scheme: Scheme) -> bool:
    """Whether the kernel encodes single tokens for a scheme, as its class says."""
    rules = [scheme.for_role(role).minmax(DIM) for role in Role]
    # With sub-blocks the kernel writes no codes of a block that is not whole, which nobody reads: test_triton_moves compares whole ones.
    return scheme.window > 0 and scheme.window & (scheme.window - 1) == 0 and all(rule is not None and not rule.subblock for rule in rules)


NAMED = {text.partition("(")[0] for text in SPELLED}
"""Schemes with cases here."""
OTHERS = tuple(kind.name for kind in SCHEMES if kind.name not in NAMED and token_kernel_knows(kind()))


def compare(spelled: tuple[str, ...]) -> None:
    """Single tokens across a block's end behind a filled window, both slots in one launch: every plane and result, bit for bit."""
    from kvcompile.lowering.append import window_token as triton_append

    fuse()
    for index, text in enumerate(spelled):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        pages = 2 if index == 4 else 3
        halves = [schemes.parse(text).for_role(role) for role in Role]
        before = 126 if index == 4 else halves[0].window + halves[0].block - 1
        x = torch.randn(2, KV, before + 3, DIM, generator=torch.Generator().manual_seed(index)) * 3 + torch.arange(DIM)
        x[0, 0, -2] = 0
        x[1, 1, -1, 5] = float("nan")
        x[0, 1, -1, 6] = float("inf")
        x = x.to(dtype)
        for origin, rows in ((None, 1), (torch.tensor([0, 3]), 2)):
            stores = []
            for scheme, role in zip(halves, Role, strict=True):
                layout = scheme.layout(SlotSpec(KV, DIM, dtype, role))
                planes = [torch.zeros(plane.shape(pages, 2, KV), dtype=plane.dtype) for plane in layout.planes]
                windows.append_window_body(x[:, :, :before], planes, torch.arange(before).expand(rows, -1), origin, scheme.spec())
                stores.append(planes)
            kernel = [[plane.clone() for plane in planes] for planes in stores]
            # The last one is out of order; with two pages, tokens 128 and on are beyond the store.
            for at in (*range(before, before + 3), before + 9):
                pos, new = torch.full((rows, 1), at), x[:, :, min(at, before + 2)].unsqueeze(2)
                slots = [
                    triton_append.WindowSlot(new, planes, pos, origin, half.spec()) for planes, half in zip(kernel, halves, strict=True)
                ]
                assert all(triton_append.fits(slot) for slot in slots)
                # The clock is read before it moves on.
                origins = [slot.used for slot in slots]
                found = zip(triton_append.append_window_slots(slots), origins, strict=True)
                for planes, half, mine, results in zip(stores, halves, kernel, found, strict=True):
                    wanted = windows.append_window_body(new, planes, pos, origin, half.spec())
                    what = (half.spec(), dtype, at, rows)
                    assert_same((*one_nan(mine, text), *results), (*one_nan(planes, text), *wanted), what)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("texts", [SPELLED, SYMMETRIC, *((name,) for name in OTHERS)], ids=lambda texts: texts[0])
def test_the_kernel_is_the_body_bit_for_bit(texts: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    interpreted(compare, texts)


# Two slots have all that one has.
@pytest.mark.parametrize(("capability", "slots", "own"), [
    (90, 1, {}), (90, 2, {}), (80, 2, {}), (100, 2, {}),
    (90, 2, {"BITS": 4, "PARTS": 2, "QMAX": 7.0}), (90, 1, {"BITS": 8, "PARTS": 1, "GROUP": 128, "QMAX": 127.0}),
    (90, 1, {"BITS": 8, "PARTS": 1, "GROUP": 128, "QMAX": 448.0, "E4M3": 2}),
    (80, 1, {"BITS": 8, "PARTS": 1, "GROUP": 128, "QMAX": 448.0, "E4M3": 1}),
])
def test_the_kernel_compiles_offline(capability: int, slots: int, own: dict[str, Any]) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.append.window_token import APPEND_TOKEN

    kernel = APPEND_TOKEN.one if slots == 1 else APPEND_TOKEN.two
    names, constants = kernel.arg_names, {**CONSTANTS, "BLOCK": 1 if own else 32, **own}
    if slots == 2:
        constants |= {f"{name}_2": value for name, value in (CONSTANTS | own).items()} | {"BLOCK_2": 1}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name.removesuffix("_2"), "i32") for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
