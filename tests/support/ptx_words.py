"""Instructions on the registers of a warp in numpy, for ``ptx``: products of tensor cores, exchanges between lanes, functions of bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

LANES = 32
SIGNS: dict[str, Any] = {
    "f16": np.uint16(0x8000), "bf16": np.uint16(0x8000), "f32": np.uint32(0x80000000), "f16x2": np.uint32(0x80008000),
    "bf16x2": np.uint32(0x80008000), "f64": np.uint64(1 << 63),
}
"""The bits of signs."""


def integer_product(a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray]) -> list[np.ndarray]:
    """m16n8k32 on fragments of signed bytes: four registers of int32 a lane."""
    lane = np.arange(LANES)
    g, t = lane // 4, lane % 4
    left, right, into = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64), np.zeros((16, 8), np.int64)

    def bytes_of(register: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(register, np.uint32), LANES)).view(np.int8).reshape(LANES, 4)

    for index, register in enumerate(a):
        for byte, values in enumerate(bytes_of(register).T):
            left[g + 8 * (index % 2), 4 * t + byte + 16 * (index // 2)] = values
    for index, register in enumerate(b):
        for byte, values in enumerate(bytes_of(register).T):
            right[4 * t + byte + 16 * index, g] = values
    for index, register in enumerate(c):
        into[g + 8 * (index // 2), 2 * t + index % 2] = np.broadcast_to(np.asarray(register, np.uint32), LANES).view(np.int32)
    result = (left @ right + into).clip(-(2**31), 2**31 - 1).astype(np.int32)
    return [result[g + 8 * (index // 2), 2 * t + index % 2].view(np.uint32) for index in range(4)]


def permuted(a: Any, b: Any, selector: Any) -> np.ndarray:
    """prmt: four of eight bytes."""
    low, high = (np.broadcast_to(np.asarray(side, np.uint32), LANES).astype(np.uint64) for side in (a, b))
    both = low | high << np.uint64(32)
    found, selectors = np.zeros(LANES, np.uint32), np.broadcast_to(np.asarray(selector, np.uint64), LANES)
    for place in range(4):
        select = (selectors >> np.uint64(4 * place)) & np.uint64(0xF)
        byte = ((both >> (np.uint64(8) * (select & np.uint64(7)))) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(select & np.uint64(8), np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0)), byte)
        found |= byte << np.uint32(8 * place)
    return found


def logic(a: Any, b: Any, c: Any, table: int) -> np.ndarray:
    """lop3: any function of three bits."""
    a, b, c = (np.broadcast_to(np.asarray(x, np.uint32), LANES) for x in (a, b, c))
    found = np.zeros(LANES, np.uint32)
    for index in range(8):
        if table >> index & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return found


def product(a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray], kind: str) -> list[np.ndarray]:
    """m16n8k16 on fragments: four registers of float32 a lane."""
    lane = np.arange(LANES)
    g, t = lane // 4, lane % 4
    left, right, into = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    for index, register in enumerate(a):
        low, high = halves(register, kind)
        row, column = g + 8 * (index % 2), 2 * t + 8 * (index // 2)
        left[row, column], left[row, column + 1] = low, high
    for index, register in enumerate(b):
        low, high = halves(register, kind)
        right[2 * t + 8 * index, g], right[2 * t + 8 * index + 1, g] = low, high
    for index, register in enumerate(c):
        into[g + 8 * (index // 2), 2 * t + index % 2] = np.broadcast_to(register, LANES).view(np.float32)
    with np.errstate(all="ignore"):
        result = (left.astype(np.float64) @ right.astype(np.float64) + into).astype(np.float32)
    return [result[g + 8 * (index // 2), 2 * t + index % 2].view(np.uint32) for index in range(4)]


def halves(register: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The two 16-bit floats of a register, widened."""
    words = np.broadcast_to(np.asarray(register, np.uint32), LANES)
    low, high = (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)
    if kind == "bf16":
        return tuple((half.astype(np.uint32) << np.uint32(16)).view(np.float32) for half in (low, high))  # type: ignore[return-value]
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit words in a register."""
    return np.asarray(low).astype(np.uint16).astype(np.uint32) | (np.asarray(high).astype(np.uint16).astype(np.uint32) << np.uint32(16))


def by_halves(function: Callable[..., np.ndarray], *registers: np.ndarray, kind: str) -> np.ndarray:
    """A function on both halves of registers; of a bfloat16 alone, on the lower one."""
    words = [np.broadcast_to(np.asarray(register), LANES).astype(np.uint32) for register in registers]
    read, write = HALVES[kind]
    parts = [
        write(function(*(read(((word >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.uint16)) for word in words))) for shift in (0, 16)
    ]
    return packed(*parts) if kind.endswith("x2") else np.asarray(parts[0]).astype(np.uint16)


def transposed(register: np.ndarray) -> np.ndarray:
    """movmatrix: an 8 x 8 of 16-bit words, transposed."""
    words = np.broadcast_to(register, LANES)
    lane = np.arange(LANES)
    matrix = np.zeros((8, 8), np.uint16)
    matrix[lane // 4, 2 * (lane % 4)] = words & np.uint32(0xFFFF)
    matrix[lane // 4, 2 * (lane % 4) + 1] = words >> np.uint32(16)
    return packed(matrix.T[lane // 4, 2 * (lane % 4)], matrix.T[lane // 4, 2 * (lane % 4) + 1])


def matrices(warp: Any, addresses: np.ndarray, count: int, turned: bool) -> list[np.ndarray]:
    """ldmatrix: 8 x 8 of 16-bit words, whose rows eight lanes each point to."""
    found, lane = [], np.arange(LANES)
    for index in range(count):
        rows = np.broadcast_to(addresses, LANES)[8 * index + lane // 4]
        words = warp.load("shared", rows + (4 * (lane % 4)).astype(rows.dtype), np.uint32, 1, np.ones(LANES, bool))[0]
        found.append(transposed(words) if turned else words)
    return found


def store_matrices(warp: Any, addresses: np.ndarray, registers: Sequence[np.ndarray], turned: bool) -> None:
    """stmatrix: the way back of ``matrices``."""
    lane = np.arange(LANES)
    for index, words in enumerate(registers):
        rows = np.broadcast_to(addresses, LANES)[8 * index + lane // 4]
        found = transposed(words) if turned else words
        warp.store("shared", rows + (4 * (lane % 4)).astype(rows.dtype), [found], np.uint32, np.ones(LANES, bool))


def exchanged(value: Any, other: Any, mode: str, width: int) -> np.ndarray:
    """shfl of whole warps."""
    lane = np.arange(LANES)
    step = np.broadcast_to(np.asarray(other), LANES).astype(np.int64)
    source = {"bfly": lane ^ step, "idx": step % LANES, "down": lane + step, "up": lane - step}[mode]
    source = np.where((source < 0) | (source >= LANES), lane, source)
    return np.broadcast_to(np.asarray(value, np.uint32), LANES)[source]


def reduced(value: Any, name: str) -> np.ndarray:
    """redux over the warp, of signed numbers."""
    numbers = np.broadcast_to(value, LANES).view(np.int32)
    found = {"max": numbers.max, "min": numbers.min, "add": numbers.sum}[name]()
    return np.full(LANES, found, np.int32).view(np.uint32)


def as_bfloat(word: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as float32."""
    return (word.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded_to_bfloat(value: Any) -> np.ndarray:
    """Float32 to the bits of bfloat16, to nearest even."""
    found = torch.from_numpy(np.array(np.broadcast_to(value, LANES), np.uint32).view(np.float32)).to(torch.bfloat16)
    return found.view(torch.int16).numpy().view(np.uint16)


HALVES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "f16x2": (lambda word: word.view(np.float16), lambda value: value.astype(np.float16).view(np.uint16)),
    "bf16x2": (as_bfloat, lambda value: rounded_to_bfloat(value.astype(np.float32).view(np.uint32))),
    "bf16": (as_bfloat, lambda value: rounded_to_bfloat(value.astype(np.float32).view(np.uint32))),
    "s16x2": (lambda word: word, lambda value: value), "u16x2": (lambda word: word, lambda value: value),
}
"""How 16-bit halves of registers, or a bfloat16 alone, are read and written."""


def of_width(value: Any, kind: Any) -> np.ndarray:
    """A value whose type is that of its register: anything else would lose or keep bits that the register does not."""
    found = everywhere(value)
    assert found.dtype == kind, (found.dtype, kind)
    return found


def known(kind: str, kinds: Collection[str]) -> str:
    """The type of a statement, where it is one of those that are known."""
    if kind not in kinds:
        raise ValueError(kind)
    return kind


def flushed(value: np.ndarray) -> np.ndarray:
    """Float32 without numbers below the normal ones."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.float32(0), value)


def as_float(value: Any, kind: Any = np.float32) -> np.ndarray:
    """A register's bits as floats."""
    bits = {np.float32: np.uint32, np.float16: np.uint16, np.float64: np.uint64}[kind]
    return np.broadcast_to(np.asarray(value, bits), LANES).copy().view(kind)


def as_signed(value: Any, kind: Any = np.int32) -> np.ndarray:
    """A register's bits as a signed number."""
    bits = np.dtype(kind).str.replace("i", "u")
    return np.broadcast_to(np.asarray(value).astype(bits), LANES).copy().view(kind)


def ones_of(value: Any) -> np.ndarray:
    """popc: how many bits of a word are set."""
    words = np.ascontiguousarray(everywhere(np.asarray(value, np.uint32)))
    return np.unpackbits(words.view(np.uint8).reshape(LANES, 4), axis=1).sum(1).astype(np.uint32)


def everywhere(value: Any) -> np.ndarray:
    """A value of every lane."""
    return np.broadcast_to(value, LANES)


def trapped(condition: Any) -> None:
    """Raise where a lane traps."""
    if np.asarray(condition).any():
        raise RuntimeError("a trap: a device's assertion failed")


def together(condition: np.ndarray) -> bool:
    """A condition that all lanes agree on."""
    if condition.all() != condition.any():
        raise RuntimeError("lanes of a warp take different ways")
    return bool(condition[0])
