"""The PTX of tables, run in numpy: every code of every place becomes its level, in the register and at the place that its use expects."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from inline_assembly import LANES, Warp

from kvcompile import schemes
from kvcompile.lowering.codegen import prmt_key_lookup, shared_tables, smem_value_lookup, vector_scales
from kvcompile.lowering.decode.slot_plan import INDEX_BITS as BITS
from kvcompile.lowering.decode.slot_plan import TemplateSlot, slot_plan
from kvcompile.schemes.asymmetric import pack
from kvcompile.types import Role


class Pointer(int):
    """An address that is cast as Triton casts pointers."""

    def to(self, kind: type) -> int:
        return kind(self)


def registers(block: Any) -> list[np.ndarray]:
    """The registers of an operand: a list of them, or one."""
    return block if isinstance(block, list) else [block]


def run(warp: Warp, text: str, **names: Any) -> list[np.ndarray]:
    """A printed ``tl.inline_asm_elementwise`` on registers of 32 lanes."""

    def assembly(text: str, constraints: str, operands: list[Any], dtype: object, is_pure: bool, pack: int) -> list[np.ndarray]:
        del dtype, is_pure, pack
        return warp(text, constraints, [register for operand in operands for register in registers(operand)])

    kinds = {name: name for name in ("int8", "float16", "float32", "int32")}
    tl = types.SimpleNamespace(inline_asm_elementwise=assembly, int64=int, **kinds)
    return eval(text, {"tl": tl}, names)


def halves(words: np.ndarray) -> np.ndarray:
    """Registers as float16 [..., 2], the low half first."""
    return np.ascontiguousarray(words.astype("<u4"))[..., None].view("<f2")


def random_words(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 1 << 32, 8 * LANES, dtype=np.uint64) for _ in range(count)]


def plan_of(bits: int, role: Role, dim: int = 128) -> TemplateSlot:
    """The plan of a slot of ``beyond``."""
    return slot_plan(schemes.parse(f"beyond(bits={bits})").spec(), role, dim, torch.uint8, torch.bfloat16, wide=True, packed=True)


def columns_of_thread() -> list[tuple[int, int]]:
    """(column, register) of what thread 0 of a row has of a run, four columns to a register."""
    return [(column, 2 * (column // 16)) for column in (*range(4), *range(16, 20))]


@pytest.mark.parametrize(("bits", "dim"), [(2, 128), (3, 128), (4, 128), (5, 128), (3, 256), (5, 256), (2, 64)])
def test_keys_are_picked_in_the_order_of_the_tensor_cores(bits: int, dim: int) -> None:
    """The blocks of each plane of a piece add up to the level of the channel that the piece says of each column."""
    warp, plan = Warp(), plan_of(bits, Role.KEY, dim)
    generator = np.random.default_rng(1)
    levels = generator.integers(0, prmt_key_lookup.LARGEST + 1, 1 << bits).astype(np.uint64)
    at = shared_tables.plane_bytes(bits)
    run(warp, shared_tables.declared("planes", 2 * at))
    index = np.arange(1 << bits, dtype=np.uint64)
    run(warp, shared_tables.store_planes(bits, "planes", at, "index", "level", 7), index=index, level=levels)
    # Two tokens, rows g and 8 + g of a tile, in each of the lanes; thread 0 of both.
    codes = generator.integers(0, 1 << bits, (2, LANES, dim))
    rows = pack(torch.from_numpy(codes), bits).numpy()
    runs = {}
    for byte_run in plan.byte_runs:
        part = np.zeros((2, LANES, prmt_key_lookup.RUN), np.uint64)
        part[..., : byte_run.count] = rows[..., byte_run.first : byte_run.first + byte_run.count]
        four = [sum(part[row, :, 16 * half + byte] << np.uint64(8 * byte) for byte in range(4)) for half in range(2) for row in range(2)]
        runs[byte_run.name] = four
    blocks, seen = prmt_key_lookup.picked_blocks(bits), set()
    assert len(prmt_key_lookup.picked_names(bits).split(",")) == 2 * blocks
    for piece in plan.pieces:
        found = run(warp, prmt_key_lookup.picked(bits, piece.sides, list(runs), "planes", at), **runs)
        for column, register in columns_of_thread():
            if eval(piece.word(str(column))) >= piece.chunk.count:
                continue
            channel = eval(piece.channel(str(column)))
            seen.add(channel)
            for row in range(2):
                high, low = (
                    sum((found[4 * (plane * blocks + block) + register + row] >> np.uint64(8 * (column % 4))) & np.uint64(255)
                        for block in range(blocks))
                    for plane in range(2)
                )
                assert np.array_equal(high * 128 + low, levels[codes[row, :, channel]]), (piece, column, row)
            where, word = (eval(text) for text in plan.place(str(channel)))
            assert plan.pieces[where] == piece and eval(prmt_key_lookup.picked_column(str(word))) == column
    assert len(seen) == sum(eval(piece.word(str(c))) < piece.chunk.count for piece in plan.pieces for c, _ in columns_of_thread())


def test_columns_of_a_piece_are_its_words_four_to_a_thread() -> None:
    words = [eval(prmt_key_lookup.picked_word(str(column))) for column in range(32)]
    assert sorted(words) == list(range(32)) and all(word // 4 % 4 == column % 16 // 4 for column, word in enumerate(words))
    assert [eval(prmt_key_lookup.picked_column(str(word))) for word in words] == list(range(32))


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("bits", BITS)
def test_values_of_two_tokens_are_one_pair(bits: int, stride: int) -> None:
    memory = np.random.default_rng(2).standard_normal(512).astype(np.float32)
    warp, start, plan = Warp(memory), 7, plan_of(bits, Role.VALUE)
    run(warp, shared_tables.declared("pairs", smem_value_lookup.pair_bytes(bits)))
    run(warp, smem_value_lookup.fill_pairs(bits, "pairs", "levels", str(stride)), levels=Pointer(4 * start))
    halved = (memory[start : start + stride * (1 << bits) : stride] * np.float32(0.5)).astype(np.float16)
    codes = np.random.default_rng(4).integers(0, 1 << bits, (2, LANES, 128))
    rows = pack(torch.from_numpy(codes), bits).numpy().reshape(2, LANES, plan.segments, plan.row_words).astype(np.uint64)
    for view in range(plan.row_words // 2):
        pair = rows[..., 2 * view] | rows[..., 2 * view + 1] << np.uint64(8)
        words = {f"w{segment}": pair[0, :, segment] | pair[1, :, segment] << np.uint64(16) for segment in range(plan.segments)}
        for byte in range(2):
            for part in range(128 // plan.row_words):
                (found,) = run(warp, smem_value_lookup.looked_up(bits, part, byte, list(words), "pairs"), **words)
                wanted = halved[codes[:, :, part * plan.row_words + 2 * view + byte]]
                assert np.array_equal(halves(found), wanted.T), (view, byte, part)


@pytest.mark.parametrize("part", range(2))
def test_values_in_registers_are_those_of_pairs(part: int) -> None:
    warp, bits = Warp(), 4
    levels = np.random.default_rng(3).standard_normal(16).astype(np.float16)
    at = shared_tables.plane_bytes(bits)
    run(warp, shared_tables.declared("halves", 2 * at))
    index, raw = np.arange(16, dtype=np.uint64), levels.view(np.uint16).astype(np.uint64)
    run(warp, shared_tables.store_planes(bits, "halves", at, "index", "level", 8), index=index, level=raw)
    words = random_words(2)
    found = run(warp, smem_value_lookup.picked_pairs(part, "words", "halves", at), words=words)
    for byte in range(2):
        for register, word in enumerate(words):
            for token in range(2):
                code = (word >> np.uint64(16 * token + 8 * byte + 4 * part)) & np.uint64(15)
                assert np.array_equal(halves(found[2 * byte + register])[..., token], levels[code.astype(int)]), (byte, register, token)


def numbers(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Words of ``count`` float16 numbers, a lane each, and the numbers [32, count]."""
    made = np.random.default_rng(seed).standard_normal((LANES, count)).astype(np.float16)
    raw = made.view(np.uint16).astype(np.uint64)
    return sum((raw[:, at] << np.uint64(16 * at) for at in range(count)), np.zeros(LANES, np.uint64)), made


@pytest.mark.parametrize("count", [2, 4])
def test_scales_of_words_are_spread(count: int) -> None:
    warp = Warp()
    (a, one), (b, other) = numbers(count, 4), numbers(count, 5)
    wide = run(warp, vector_scales.widened("words", count), words=a)
    assert all(np.array_equal(each.astype(np.uint32).view(np.float32), one[:, at]) for at, each in enumerate(wide))
    beside = run(warp, vector_scales.beside("words", count), words=[a, b])
    assert all(np.array_equal(halves(each), np.stack([one[:, at], other[:, at]], -1)) for at, each in enumerate(beside))
    rows = run(warp, vector_scales.by_row("words", count, "like"), words=[a, b], like=np.uint64(0))[0]
    row = np.arange(LANES) // 4
    assert np.array_equal(halves(rows), np.stack([one[np.arange(LANES), row % count], other[np.arange(LANES), row % count]], -1))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_statistics_are_scales_then_zero_points(count: int, zeros: bool) -> None:
    """Columns 4 t .. 4 t + 3 of a token whose words all elements of a thread share."""
    warp = Warp()
    (scales, s), (offsets, z) = numbers(count, 6), numbers(count, 7)
    found = run(
        warp, vector_scales.statistics("scales", "zeros" if zeros else None, count, "like"), scales=[scales] * 4,
        zeros=[offsets] * 4, like=np.uint64(0),
    )
    lane = np.arange(LANES)
    for place in range(4):
        column = 4 * (lane % 4) + place
        wanted = np.where(zeros & (column % (2 * count) >= count), z[lane, column % count], s[lane, column % count])
        assert np.array_equal(halves(found[place // 2])[..., place % 2], wanted)


@pytest.mark.parametrize("itemsize", [1, 2])
def test_what_is_kept_is_taken_by_index(itemsize: int) -> None:
    warp = Warp()
    run(warp, shared_tables.declared("kept", 8 + LANES * itemsize))
    values = np.random.default_rng(8).integers(0, 1 << (8 * itemsize), LANES).astype(np.uint64)
    index = np.arange(LANES, dtype=np.uint64)
    run(warp, shared_tables.kept("kept", 8, "index", "value", itemsize), index=index, value=values)
    places = np.random.default_rng(9).permutation(LANES)
    text = shared_tables.taken("kept", 8, "places", "tl.int8", itemsize)
    (found,) = run(warp, text[: text.index("pack=1)") + len("pack=1)")], places=places.astype(np.uint64))
    signed = found.astype(np.int64).astype(np.int8 if itemsize == 1 else np.uint16)
    assert np.array_equal(signed, values.astype(signed.dtype)[places])
