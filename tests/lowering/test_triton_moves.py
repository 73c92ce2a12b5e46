"""The append kernels where errors of channels move others (squat), in Triton's interpreter against the body, and compiled offline."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted
from test_triton_append import CONSTANTS, POINTERS, fuse

from kvcompile import schemes
from kvcompile.lowering.ops import append_window as windows
from kvcompile.lowering.ops.operations import calibrate_body
from kvcompile.types import Role, SlotSpec

KV, BATCH, DIM = 2, 2, 64
# Scheme, dtype. Row by row, every batch row has moves of its own.
CASES = (
    ("squat(subblock=16)", torch.float32), ("squat(bits=4,lam=30.0,subspace=row)", torch.float16),
    ("squat(bits=3,window=64)", torch.float32), ("squat(subblock=8,rank=64)", torch.float32),
)


def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, K, S, D], with what is not finite in a few groups."""
    x = torch.randn(BATCH, KV, count, DIM, generator=torch.Generator().manual_seed(3)) * 2 + torch.arange(DIM) / 16
    x[0, 0, 40, 5] = float("nan")
    x[1, 1, 70, 20] = float("inf")
    return x.to(dtype)


def stores(text: str, dtype: torch.dtype, pages: int) -> tuple[list[torch.Tensor], ...]:
    """Key planes of the body and of the kernel, taught by the same queries, which are correlated."""
    scheme = schemes.parse(text).for_role(Role.KEY)
    planes = [torch.zeros(p.shape(pages, BATCH, KV), dtype=p.dtype) for p in scheme.layout(SlotSpec(KV, DIM, dtype, Role.KEY)).planes]
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(BATCH, 2 * KV, 50, 6, generator=draw) @ torch.randn(6, DIM, generator=draw)
    calibrate_body(q, planes[-1:], None, scheme.spec())
    assert planes[-1].abs().max() > 0.05
    return planes, [plane.clone() for plane in planes]


def decoded(planes: list[torch.Tensor], text: str, count: int) -> torch.Tensor:
    """The first ``count`` tokens [B, K, count, D]."""
    flat = tuple(plane.permute(1, 2, 0, 3, 4).flatten(2, 3) for plane in planes[:3])
    return schemes.parse(text).for_role(Role.KEY).decode(flat, SlotSpec(KV, DIM, torch.float32, Role.KEY))[:, :, :count]


def different(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of numbers that differ by more than what one more or less unit of a stored scale makes."""
    close = torch.isclose(one, other, rtol=2e-3, atol=1e-3, equal_nan=True)
    return 1 - close.double().mean().item()


def compare(text: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """A prompt, then single tokens across a block's end: whole blocks but for neighbors, the window exactly."""
    from kvcompile.lowering.append import window_blocks as triton_append_blocks
    from kvcompile.lowering.append import window_token as triton_append

    if device == "cpu":
        fuse()
    scheme, x = schemes.parse(text).for_role(Role.KEY), tokens(130, dtype).to(device)
    wanted, found = ([plane.to(device) for plane in planes] for planes in stores(text, dtype, 3))
    for begin, end in ((0, 95), *((at, at + 1) for at in range(95, 98)), (98, 127), (127, 128)):
        pos, new = torch.arange(begin, end, device=device)[None], x[:, :, begin:end]
        slot = triton_append.WindowSlot(new, found, pos, None, scheme.spec())
        one = triton_append.fits(slot)
        assert one == (end - begin == 1) and (one or triton_append_blocks.fits(slot))
        used = slot.used
        (recent,) = triton_append.append_window_slots([slot]) if one else triton_append_blocks.append_window_blocks([slot])
        expected = windows.append_window_body(new, wanted, pos, None, scheme.spec())
        for mine, theirs in ((recent, expected[0]), (used, expected[1]), (found[3], wanted[3]), (found[4], wanted[4])):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)), (text, begin)
        whole = end // scheme.block * scheme.block
        apart = different(decoded(found, text, whole), decoded(wanted, text, whole))
        assert apart < 2e-3, (text, begin, apart)
        assert torch.equal(found[5], wanted[5])
    # What is compared is what moves make of it.
    still = [plane.clone() for plane in wanted[:3]]
    kivi = schemes.parse(f"kivi(bits={scheme.bits},window={scheme.window})").for_role(Role.KEY)
    for plane, rows in zip(still, kivi.encode(torch.cat([x[:, :, :128], x[:, :, :64]], 2)), strict=True):
        plane.copy_(rows.unflatten(2, (3, plane.shape[3])).permute(2, 0, 1, 3, 4))
    assert different(decoded(still, text, 128), decoded(wanted, text, 128)) > 0.2


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("text", "dtype"), CASES)
def test_kernels_move_channels_as_the_body_does(text: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    interpreted(compare, text, dtype)


def test_what_is_too_narrow_is_the_body_s() -> None:
    """Tensor cores take 16 tokens at least; narrow sub-blocks are quantized with their neighbours."""
    pytest.importorskip("triton")
    from kvcompile.lowering.append import window_token as triton_append

    new, pos = torch.zeros(BATCH, KV, 1, DIM), torch.zeros(1, 1, dtype=torch.int64)
    for text, known in (("squat(subblock=8)", True), ("squat(subblock=1)", True), ("squat(group=8,window=8)", False)):
        planes, _ = stores(text, torch.float32, 1)
        slot = triton_append.WindowSlot(new, planes, pos, None, schemes.parse(text).for_role(Role.KEY).spec())
        assert triton_append.fits(slot) is known, text


def compiled(many: bool, capability: int, subblock: int) -> str:
    """The PTX of the kernel of one token, or of many, for heads of 128 channels."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.lowering.append.window_blocks import APPEND_BLOCKS
    from kvcompile.lowering.append.window_token import APPEND_TOKEN

    kernel = (APPEND_BLOCKS if many else APPEND_TOKEN).one
    names, constants = kernel.arg_names, {**CONSTANTS, "BLOCK": 32, "SUB": subblock, "ROWS": 32}
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else {**POINTERS, "OWN": "*fp32"}.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"])


@pytest.mark.parametrize(("many", "capability"), [(False, 90), (True, 90), (True, 80), (True, 100)])
def test_the_kernels_compile_offline(many: bool, capability: int) -> None:
    assert "mma" in compiled(many, capability, 32)


@pytest.mark.parametrize("many", [False, True])
def test_sub_blocks_are_a_loop(many: bool) -> None:
    """Sixteen sub-blocks, or 64, are as many instructions as eight; unrolled they were 4.5 times as many, and a minute of compiling."""
    eight, sixteen, most = (compiled(many, 90, channels) for channels in (16, 8, 2))
    for text in (sixteen, most):
        assert text.count("mma.sync") == eight.count("mma.sync") > 0
        assert len(text.splitlines()) < 1.05 * len(eight.splitlines())
