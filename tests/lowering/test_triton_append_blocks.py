"""The append kernels of many tokens into a window, in Triton's interpreter against the body they stand for, bit for bit, and offline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from registry import SCHEMES
from test_triton_append import CONSTANTS, POINTERS, assert_same, fuse, one_nan

from kvcompile import schemes
from kvcompile.lowering.ops import append_window as windows
from kvcompile.types import MinMax, Role, SlotSpec

KV, BATCH = 2, 2

# Scheme, head dim, dtype, pages. The interpreter cuts bfloat16 instead of rounding, so bfloat16 scales are left to a GPU.
CASES = (
    ("kivi", 64, torch.bfloat16, 3), ("kivi(window=128)", 128, torch.bfloat16, 2), ("kivi(bits=3)", 64, torch.float16, 2),
    ("kivi(bits=4,group=16,window=64,scale_dtype=float32)", 64, torch.float32, 1), ("squat(lam=0.0)", 128, torch.float16, 2),
    ("normed", 64, torch.float16, 2), ("normed(bits=4,group=16,window=64,scale_dtype=float32)", 64, torch.float32, 2),
    ("int4(window=32)", 64, torch.float16, 3), ("int8(window=16)", 128, torch.bfloat16, 2), ("fp8(window=64)", 64, torch.float16, 2),
    ("int4(window=8,group=16,scale_dtype=float32)", 64, torch.float32, 2), ("kivi(group=64)", 64, torch.bfloat16, 3),
    ("kivi(group=128,axis=token)", 128, torch.float16, 2),
)
NAMED = {case[0].partition("(")[0] for case in CASES}
CASES += tuple(
    (kind.name, 64, torch.float16, 2) for kind in SCHEMES
    if kind.name not in NAMED and kind().window and all(kind().for_role(role).minmax(64) is not None for role in Role)
)
"""Those, and registered schemes with a window that let the kernels encode."""
# Tokens of the calls, one behind the other: less than a window, a window, more.
PIECES = ((7, 32, 75), (114,))


def new_tokens(seed: int, count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, K, S, D] as projections lay them, [B, S, K, D], with ties, zeros, a constant token, tiny and huge ones, NaN and infinities."""
    x = torch.randn(BATCH, count, KV, dim, generator=torch.Generator().manual_seed(seed)) * 3 + torch.arange(dim) / 8
    x[0, 2] = 0
    x[0, 3] = -1.5
    x[0, 4] = (torch.arange(dim) % 8) / 2
    x[1, 5] *= 2.0**-22
    x[1, 6] *= 2.0**8
    x[0, 40, 1, 5] = float("nan")
    x[1, 41, 0, 6] = float("inf")
    x[1, 80, 1, 7] = -float("inf")
    return x.to(dtype).transpose(1, 2)


def empty(text: str, dim: int, dtype: torch.dtype, pages: int, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Planes of keys and values, full of what must not be seen where anything is written."""
    layouts = [schemes.parse(text).for_role(role).layout(SlotSpec(KV, dim, dtype, role)) for role in Role]
    shapes = [[(plane.shape(pages, BATCH, KV), plane.dtype) for plane in layout.planes] for layout in layouts]
    stores = [[torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in planes] for planes in shapes]
    for planes in stores:
        for plane in planes[:3]:
            plane.fill_(5)
    return stores


def calls(count: int, pieces: tuple[int, ...], rows: int) -> list[tuple[slice, torch.Tensor]]:
    """What every call writes and where; behind the pieces one that repeats tokens, out of order, and one that begins anew with a hole."""
    made, begin = [], 0
    for piece in pieces:
        made.append((slice(begin, begin + piece), torch.arange(begin, begin + piece).expand(rows, -1)))
        begin += piece
    again = torch.arange(9, 49)
    hole = torch.arange(count - 30)
    hole[12:] += 1
    return [*made, (slice(9, 49), again.expand(rows, -1)), (slice(30, count), hole.expand(rows, -1))]


def origins() -> list[tuple[torch.Tensor | None, int]]:
    """Origins of the rows, and rows of positions: nothing padded; short padding; a row that is padding through whole calls."""
    return [(None, 1), (None, BATCH), (torch.tensor([0, 3]), BATCH), (torch.tensor([70, 9]), 1)]


def compare(case: int) -> None:
    """Every plane and result of both slots in the same launches after every call, bit for bit.

    All origins in all pieces take the interpreter minutes: a case has each pieces with an origin of its own, all cases have all pairs.
    """
    from kvcompile.lowering.append import window_blocks as kernels
    from kvcompile.lowering.append.window_token import WindowSlot

    fuse()
    text, dim, dtype, pages = CASES[case]
    halves = [schemes.parse(text).for_role(role).spec() for role in Role]
    count = sum(PIECES[0])
    new = [new_tokens(2 * case + index, count, dim, dtype) for index in range(2)]
    for pieces, (origin, rows) in zip(PIECES, (origins() * 2)[case % 4 :], strict=False):
        wanted, found, alone = (empty(text, dim, dtype, pages) for _ in range(3))
        for index, (which, pos) in enumerate(calls(count, pieces, rows)):
            slots = [WindowSlot(x[:, :, which], planes, pos, origin, half) for x, planes, half in zip(new, found, halves, strict=True)]
            assert all(kernels.fits(slot) for slot in slots), text
            # The clock is read before it moves on.
            used = [slot.used for slot in slots]
            results = list(zip(kernels.append_window_blocks(slots), used, strict=True))
            if index == 0:
                kernels.append_window_blocks([slots[0]._replace(planes=alone[0])])
                assert_same(one_nan(alone[0], text), one_nan(found[0], text), (text, "alone"))
            for x, planes, half, mine, given in zip(new, wanted, halves, found, results, strict=True):
                body = windows.append_window_body(x[:, :, which], planes, pos, origin, half)
                what = (half, dim, dtype, rows, origin, pieces, index)
                assert_same((*one_nan(mine, text), *given), (*one_nan(planes, text), *body), what)


@pytest.mark.parametrize(("text", "case"), [(item[0], index) for index, item in enumerate(CASES)])
@pytest.mark.timeout(300)
def test_the_kernels_are_the_body_bit_for_bit(text: str, case: int) -> None:
    pytest.importorskip("triton")
    interpreted(compare, case)


@pytest.mark.parametrize(("text", "dim", "dtype", "pages"), CASES)
def test_pieces_are_the_whole(text: str, dim: int, dtype: torch.dtype, pages: int) -> None:
    """Of the body, which the kernels are bit for bit."""
    count = sum(PIECES[0])
    for seed, role in enumerate(Role):
        x, half = new_tokens(seed, count, dim, dtype), schemes.parse(text).for_role(role).spec()
        for origin, rows in origins():
            whole = []
            for pieces in PIECES:
                planes = empty(text, dim, dtype, pages)[seed]
                for which, pos in calls(count, pieces, rows)[: len(pieces)]:
                    windows.append_window_body(x[:, :, which], planes, pos, origin, half)
                whole.append(planes)
            assert_same(whole[0], whole[1], (text, rows, origin))


@pytest.mark.parametrize(("text", "count", "dim", "window"), [
    ("kivi", 1, 64, 32), ("squat(group=8,window=8)", 40, 64, 8), ("kivi", 40, 96, 32), ("kivi(window=96)", 40, 64, 96),
    ("kivi(group=64,window=64)", 40, 256, 64), ("int4(window=48)", 40, 64, 48), ("int4(window=1024)", 40, 64, 1024),
    ("nf4(window=32)", 40, 64, 32), ("gauss(window=32)", 40, 64, 32), ("int4(granularity=tensor,window=32)", 40, 64, 32),
])
def test_what_the_kernels_do_not_know(text: str, count: int, dim: int, window: int) -> None:
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_blocks import fits
    from kvcompile.lowering.append.window_token import WindowSlot

    planes = empty(text, dim, torch.bfloat16, 2)[0]
    x, half = torch.zeros(BATCH, KV, count, dim, dtype=torch.bfloat16), schemes.parse(text).for_role(Role.KEY).spec()
    slot = WindowSlot(x, planes, torch.arange(count)[None], None, half)
    assert slot.window.shape[3] == window
    assert not fits(slot)


def constants_of(bits: int, dim: int, window: int, block: int) -> dict[str, Any]:
    """Of the first launch, for groups of 32."""
    parts, segments = {2: (4, 1), 3: (8, 3), 4: (2, 1)}[bits]
    return {
        **CONSTANTS, "D": dim, "W": window, "BITS": bits, "PARTS": parts, "SEGMENTS": segments, "BLOCK": block,
        "ROWS": max(block, min(64, 4096 // dim)),
    }


def offline(kernel: Any, constants: dict[str, Any], capability: int, warps: int) -> Any:
    """The kernel as a device of one capability gets it; strides as they are at 8 heads of 128 channels, in units of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else POINTERS.get(name.removesuffix("_2"), "i32") for name in names}
    for index in ("", "_2"):
        # As a launch sees them: channels lie side by side.
        if f"x_d{index}" in names:
            signature[f"x_d{index}"], constants = "constexpr", {**constants, f"x_d{index}": 1}
    sixteens = ("x_b", "x_h", "x_s", "codes_n", "codes_b", "codes_h", "scales_n", "scales_b", "scales_h")
    aligned = [at for at, name in enumerate(names) if signature[name].startswith("*") or name.removesuffix("_2") in sixteens]
    source = ASTSource(
        kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def both(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Constants of two slots."""
    return {**own, **{f"{name}_2": value for name, value in other.items()}}


def spilled(compiled: Any) -> int:
    """Stores of registers to local memory in the machine code."""
    from kvcompile.lowering.decode.offline import sass

    return sass(compiled.asm["cubin"]).count("STL")


# Three bits have segments and parts, a window of 128 the longest copies, 256 channels the most registers.
@pytest.mark.parametrize(("block", "subblock", "channels", "contiguous", "known"), [
    (16, 8, 16, True, True), (32, 16, 64, True, True), (15, 8, 64, True, False), (16, 8, 15, True, False), (16, 6, 64, True, False),
    (16, 8, 64, False, False), (8, 0, 8, False, True),
])
def test_an_own_plane_is_known_from_the_tiles_of_tensor_cores_on(
    block: int, subblock: int, channels: int, contiguous: bool, known: bool,
) -> None:
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_token import _own_known

    own = torch.zeros(2, channels, channels)
    slot: Any = SimpleNamespace(own=[own if contiguous else own.mT[:, ::2]], planes=[own])
    assert _own_known(slot, MinMax(bits=4, parts=2, segments=1, group=16, block=block, subblock=subblock), channels) is known


@pytest.mark.parametrize(("capability", "bits", "dim", "window"), [
    (90, 2, 128, 32), (90, 3, 128, 128), (90, 4, 64, 128), (90, 2, 256, 32), (80, 3, 128, 128), (80, 2, 256, 32), (100, 3, 128, 128),
    (100, 2, 256, 32),
])
def test_the_kernels_compile_offline(capability: int, bits: int, dim: int, window: int) -> None:
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_blocks import APPEND_BLOCKS, ROLL

    keys, values = (constants_of(bits, dim, window, block) for block in (32, 1))
    first = offline(APPEND_BLOCKS.two, both(keys, values), capability, keys["ROWS"] * dim // 2048)
    assert first.asm["cubin"]
    assert not spilled(first)
    copies = [
        {**{name: own[name] for name in ("D", "W", "HEADS", "HAS_ORIGIN")}, "COPY": min(window, own["ROWS"])} for own in (keys, values)
    ]
    second = offline(ROLL.two, both(*copies), capability, 4)
    assert second.asm["cubin"]
    assert not spilled(second)


@pytest.mark.parametrize(("capability", "own"), [
    (90, {"BITS": 4, "PARTS": 2, "QMAX": 7.0}), (90, {"BITS": 8, "PARTS": 1, "GROUP": 128, "QMAX": 127.0}),
    (90, {"BITS": 8, "PARTS": 1, "GROUP": 128, "QMAX": 448.0, "E4M3": 2}), (80, {"BITS": 8, "PARTS": 1, "QMAX": 448.0, "E4M3": 1}),
])
def test_symmetric_codes_compile_offline(capability: int, own: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_blocks import APPEND_BLOCKS

    made = offline(APPEND_BLOCKS.two, both(*[constants_of(4, 128, 32, 1) | {"SEGMENTS": 1} | own] * 2), capability, 2)
    assert made.asm["cubin"]
    assert not spilled(made)


@pytest.mark.parametrize("bits", [2, 4])
def test_large_groups_compile_offline(bits: int) -> None:
    """Keys of 64 tokens a scale, values of 128 channels, the windows that come with them."""
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_blocks import APPEND_BLOCKS, ROLL

    keys, values = constants_of(bits, 128, 64, 64), constants_of(bits, 128, 128, 1)
    made = offline(APPEND_BLOCKS.two, both(keys | {"GROUP": 64}, values | {"GROUP": 128}), 90, 2)
    assert made.asm["cubin"]
    assert not spilled(made)
    copies = [{**{name: own[name] for name in ("D", "W", "HEADS", "HAS_ORIGIN")}, "COPY": own["ROWS"]} for own in (keys, values)]
    assert offline(ROLL.two, both(*copies), 90, 4).asm["cubin"]


@pytest.mark.parametrize(("block", "most"), [(32, 56), (1, 64)])
def test_words_move_between_threads_four_at_a_time(block: int, most: int) -> None:
    """Shuffles of all 64 elements of a thread, 2 bits: twice 112 and 88 where each word's parts moved alone and NaN was looked for."""
    pytest.importorskip("triton")
    from kvcompile.lowering.append.window_blocks import APPEND_BLOCKS
    from kvcompile.lowering.decode.offline import sass

    made = offline(APPEND_BLOCKS.one, constants_of(2, 128, 32, block), 90, 2)
    assert 0 < sass(made.asm["cubin"]).count("SHFL") <= most
