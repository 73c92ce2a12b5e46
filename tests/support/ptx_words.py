"""Instructions on words of a warp in numpy, for ``ptx``: integer products of the tensor cores, bytes picked, functions of bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LANES = 32


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
