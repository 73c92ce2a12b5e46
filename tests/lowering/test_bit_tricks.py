"""The printed PTX of every piece of every slot, run in numpy on pairs of words, equals the scheme's eager ``unpack``."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from kvcompile import schemes
from kvcompile.extensions.smartkv import codes
from kvcompile.extensions.smartkv.kernels import bit_fields
from kvcompile.lowering.codegen.bit_tricks import multiplied, scaled_by
from kvcompile.lowering.decode.slot_plan import TemplateSlot, slot_plan
from kvcompile.types import Role, SlotSpec

CODED = ("int8", "fp8", "int4", "kivi", "kivi(bits=4)", "int8-static", "fp8-static")


def halves(words: np.ndarray) -> np.ndarray:
    """uint32 -> float16 [..., 2], the low half first."""
    return words.astype("<u4")[..., None].view("<f2")


def packed(values: np.ndarray) -> np.ndarray:
    """float16 [..., 2] -> uint32."""
    return np.ascontiguousarray(values.astype("<f2")).view("<u4")[..., 0]


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt.b32 without sign replication."""
    either = np.stack([(side >> shift) & 255 for side in (a, b) for shift in (0, 8, 16, 24)])
    return sum(either[(selector >> (4 * place)) & 7] << np.uint32(8 * place) for place in range(4)).astype(np.uint32)


def step(name: str, x: list[np.ndarray]) -> np.ndarray:
    """One instruction on uint32 operands."""
    if name in {"shr.b32", "shl.b32"}:
        return x[0] >> x[1] if name == "shr.b32" else x[0] << x[1]
    if name == "lop3.b32":
        # Bit i of the table is the result where the operands' bits are those of i, the first one's highest.
        table = int(x[3].flat[0])
        terms = [(x[0] if i & 4 else ~x[0]) & (x[1] if i & 2 else ~x[1]) & (x[2] if i & 1 else ~x[2]) for i in range(8) if table >> i & 1]
        return np.bitwise_or.reduce(np.broadcast_arrays(*terms)).astype(np.uint32)
    if name in {"and.b32", "or.b32"}:
        return x[0] & x[1] if name == "and.b32" else x[0] | x[1]
    if name in {"add.u32", "mul.lo.u32"}:
        return x[0] + x[1] if name == "add.u32" else x[0] * x[1]
    values = [halves(one).astype(np.float64) for one in x]
    if name == "sub.f16x2":
        return packed(values[0] - values[1])
    if name == "mul.rn.f16x2":
        return packed(values[0] * values[1])
    if name == "fma.rn.f16x2":
        return packed(values[0] * values[1] + values[2])
    raise AssertionError(f"no such instruction here: {name}")


def assembly(text: str, constraints: str, operands: list[np.ndarray], dtype: str, is_pure: bool, pack: int) -> np.ndarray:
    """tl.inline_asm_elementwise on pairs."""
    assert is_pure and pack == 2
    # A 32-bit operand takes one register for each of the pair.
    named = [np.asarray(one, np.uint32) for one in operands]
    assert len(constraints.split(",")) == 1 + len(named), constraints
    registers = executed(text, {f"${index + 1}": one for index, one in enumerate(named)})
    return registers["$0"] + np.zeros_like(named[0])


def executed(text: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the registers after the instructions of ``text``."""
    for statement in filter(None, (part.strip() for part in text.strip("{} ").split(";"))):
        name, _, rest = statement.partition(" ")
        if name == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [registers[s] if s in registers else np.asarray(int(s, 0), np.uint32) for s in sources]
        registers[target] = values[0] if name == "mov.b32" else step(name, values)
    return registers


TL = types.SimpleNamespace(inline_asm_elementwise=assembly, float16="float16", uint16="uint16")


def run(text: str, **names: np.ndarray) -> np.ndarray:
    return eval(text, {"tl": TL}, names)


def pairs(count: int = 4096) -> np.ndarray:
    """All 16-bit words, each beside a random neighbor, on either side."""
    generator = np.random.default_rng(0)
    every, other = np.arange(65536, dtype=np.uint32), generator.integers(0, 65536, 65536, dtype=np.uint32)
    words = np.concatenate([every | (other << 16), other | (every << 16)])
    return words[generator.permutation(words.size)[:count]]


def eager(plan: TemplateSlot, scheme: str, role: Role, index: int, words: np.ndarray) -> np.ndarray:
    """What piece ``index`` of a chunk of two view words holds, [..., 2]."""
    fmt = schemes.parse(scheme).format(SlotSpec(1, plan.dim, torch.uint8, role))
    part, byte = divmod(index, 2)
    both = np.stack([(words >> (16 * word + 8 * byte)) & 255 for word in range(2)], -1).astype(np.uint8)
    return fmt.unpack(torch.from_numpy(both).view(fmt.word_dtype), part).double().numpy()


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("scheme", CODED)
def test_packed_pieces_equal_eager(scheme: str, role: Role) -> None:
    word = schemes.parse(scheme).format(SlotSpec(1, 128, torch.uint8, role)).word_dtype
    plan = slot_plan(scheme, role, 128, word, torch.bfloat16, wide=True, packed=True)
    assert plan.words_per_view == 2
    words = pairs()
    one, nothing = packed(np.ones(2)), packed(np.zeros(2))
    for index, piece in enumerate(piece for piece in plan.pieces if piece.chunk == plan.chunks[0]):
        wanted = eager(plan, scheme, role, index, words)
        found = halves(run(piece.unpack("word", "one", "nothing"), word=words, one=one, nothing=nothing)).astype(np.float64)
        offset = plan.offset if plan.by_token or plan.static else 0
        finite = np.isfinite(wanted)
        assert finite.mean() > 0.9
        assert np.array_equal((found * 2.0**piece.power - offset)[finite], wanted[finite]), piece
        assert not plan.static or (not finite.all() and np.isnan(found[~finite]).all()), piece


@pytest.mark.parametrize("scheme", ["kivi", "kivi(bits=4)"])
def test_shifted_values_round_once(scheme: str) -> None:
    """Scale and zero point as the kernel prepares them: a tile's power of two, then one fused multiply-add."""
    plan = slot_plan(scheme, Role.VALUE, 128, torch.uint8, torch.bfloat16, wide=True, packed=True)
    generator = np.random.default_rng(1)
    words = pairs()
    for magnitude in (1e-4, 1.0, 5000.0):
        scale = (generator.random((words.size, 2)) * magnitude + magnitude / 8).astype(np.float16)
        zero = (generator.standard_normal((words.size, 2)) * magnitude * 4).clip(-6e4, 6e4).astype(np.float16)
        place = (np.maximum(scale, np.abs(zero) * np.float16(2.0**-9)).max().view(np.int16) & 0x7FFF) >> 10
        for index, piece in enumerate(piece for piece in plan.pieces if piece.chunk == plan.chunks[0]):
            factor, factor_z = (packed(np.full(2, 2.0**power)) for power in (15.0 - place, 29.0 - place - piece.power))
            s = run(scaled_by("scale", "factor", 14), scale=packed(scale), factor=factor)
            z = run(scaled_by("zero", "factor"), zero=packed(zero), factor=factor_z)
            found = halves(run(piece.unpack("word", "s", "z"), word=words, s=s, z=z)).astype(np.float64)
            exact = eager(plan, scheme, Role.VALUE, index, words) * scale.astype(np.float64) + zero
            unit = 2.0 ** (29.0 - place - piece.power)
            allowed = np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25 / unit) * 1.001
            assert np.isfinite(found).all()
            # Scales and zero points below float16's normal range lose bits of their own when they are small beside the tile's largest.
            assert np.abs(found / unit - exact).max() <= allowed.max() * 4
            assert (np.abs(found / unit - exact) <= allowed * 1.01 + np.abs(exact).max() * 2.0**-17).all()


def test_products_are_elementwise() -> None:
    a, b = np.float16([1.5, -2.0]), np.float16([4.0, 0.25])
    assert np.array_equal(halves(run(multiplied("a", "b"), a=packed(a), b=packed(b))), a * b)


class Register(np.ndarray):
    """Registers of two 16-bit words each, as ``fields`` loads and widens them."""

    def to(self, dtype: str) -> Register:
        del dtype
        return self


@pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fields_are_the_codes_of_smartkv(bits: int, values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of random codes of two neighbouring columns, as the packed words give it."""
    raised = torch.randint(0, 1 << bits, (4096, 8, 2), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    stored = (codes.channels(raised) ^ 128).to(torch.uint8) if bits == 8 else codes._packed(raised, bits)
    low = stored.numpy().astype(np.uint32).T
    sizes = codes.parts_of(bits, 16)
    loaded = [low[at] | (low[at + 1] << 8) | (low[at + 2] << 16) | (low[at + 3] << 24) for at in range(0, sizes[0], 4)]
    # The rest of three bits of two channels is in one word, and each takes its byte of it.
    rest = low[sizes[0] :]
    loaded += [rest[0] | (rest[1] << 8) | (rest[0] << 16) | (rest[1] << 24)] if bits == 3 else []

    def ran(text: Any, *operands: np.ndarray) -> Register:
        found = executed(text.value, {f"${number + 1}": one for number, one in enumerate(operands)})
        return found["$0"].view(Register)

    def upper_of_second(second: None, upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        return (lower & 0xFFFF) | (upper & 0xFFFF0000)

    monkeypatch.setattr(bit_fields, "tl", types.SimpleNamespace(load=lambda at, mask: at, where=upper_of_second))
    for name in ("_of", "_moved"):
        monkeypatch.setattr(bit_fields, name, lambda word, text: ran(text, word))
    monkeypatch.setattr(bit_fields, "_chosen", lambda one, other, text: ran(text, one, other))
    words = bit_fields.load_words.fn([each.astype(np.uint32).view(Register) for each in loaded], None, None, bits, True)
    for run in range(8):
        found = halves(np.asarray(bit_fields.field.fn(words[run], bits, run, values, True, None))).astype(np.float64)
        power = (getattr(bit_fields, f"POWERS_{bits}").value >> (4 * run) & 15) - 24
        wanted = (raised[:, run] - (1 << (bits - 1)) * values).double() * 2.0**power
        assert np.array_equal(found, wanted.numpy()), run
