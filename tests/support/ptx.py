"""Runs PTX in numpy, a warp at a time: what a kernel that no interpreter knows computes, from what its compiler wrote.

Every statement becomes a line of Python on arrays of 32 lanes, block by block. What would be undefined is made to show: shared memory
begins as NaN, asynchronous copies arrive as late as their waits allow, accesses outside of the tensors raise, and so do branches that
lanes of a warp do not take together. Known is what the kernels of this project need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ptx_translate import Program, translate
from ptx_words import LANES

__all__ = ["Memory", "run", "translate"]

BASE = 1 << 33
"""The address of the first tensor: beyond 32 bits, so that an address that is cut shows."""


class Memory:
    """Tensors in one address space, as bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places: dict[str, int] = {}
        at = 256
        raws = {name: stored(tensor) for name, tensor in tensors.items()}
        for name, raw in raws.items():
            self.places[name] = at
            at += -(-raw.size // 256) * 256 + 256
        self.bytes = np.zeros(at, np.uint8)
        self.owned = np.zeros(at, bool)
        for name, raw in raws.items():
            self.bytes[self.places[name] : self.places[name] + raw.size] = raw
            self.owned[self.places[name] : self.places[name] + raw.size] = True

    def address(self, name: str) -> int:
        """The address of a tensor."""
        return BASE + self.places[name]

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What a tensor holds now."""
        at = self.places[name]
        raw = self.bytes[at : at + like.numel() * like.element_size()].copy()
        return torch.from_numpy(raw).view(like.dtype).view(like.shape)

    def offsets(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        """Places in ``bytes``; raises where one is outside of the tensors or not aligned."""
        offsets = (addresses - np.uint64(BASE)).astype(np.int64)
        used = offsets[mask]
        if used.size and (used.min() < 0 or used.max() + size > self.bytes.size):
            raise IndexError(f"an access outside of all tensors: {addresses[mask]}")
        if not (self.owned[used].all() and self.owned[used + size - 1].all()):
            raise IndexError("an access between tensors")
        if (used % size).any():
            raise IndexError("an access that is not aligned")
        return np.where(mask, offsets, 0)


def stored(tensor: torch.Tensor) -> np.ndarray:
    """The bytes that a tensor's strides lead to, as they lie in memory."""
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).contiguous().view(torch.uint8).numpy()


class Registers(dict[str, Any]):
    """Registers by name; one that nobody set holds a NaN, as the other half of a number that is alone in a pair does."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("%p"):
            return np.zeros(LANES, bool)
        kind = {"%rs": np.uint16, "%rd": np.uint64}.get(name[:3], np.uint32)
        return np.full(LANES, 0x7FFF7FFF7FFF7FFF & int(np.iinfo(kind).max), kind)


class Warp:
    """The registers of 32 lanes, and the memories that they see."""

    def __init__(
        self, index: int, grid: Sequence[int], program: Sequence[int], memory: Memory, shared: np.ndarray, params: Mapping[str, int]
    ) -> None:
        self.r = Registers()
        self.index, self.grid, self.program, self.memory, self.shared, self.params = index, grid, program, memory, shared, params
        self.copies: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
        self.counts: dict[str, int] = {}

    def special(self, name: str) -> np.ndarray:
        """The value of a special register."""
        lanes = np.arange(LANES, dtype=np.uint32)
        what, _, axis = name.partition(".")
        if what == "tid":
            return lanes + np.uint32(LANES * self.index) if axis == "x" else lanes * np.uint32(0)
        if what == "laneid":
            return lanes
        values = {"ctaid": self.program, "nctaid": self.grid}[what]
        return np.full(LANES, values["xyz".index(axis)], np.uint32)

    def load(self, space: str, addresses: np.ndarray, kind: Any, count: int, mask: np.ndarray) -> list[np.ndarray]:
        """``count`` neighbors a lane."""
        size = np.dtype(kind).itemsize
        store, at = self._places(space, addresses, size * count, mask)
        words = store[at[:, None] + np.arange(size * count)].view(kind)
        return [words[:, index].copy() for index in range(count)]

    def store(self, space: str, addresses: np.ndarray, values: Sequence[np.ndarray], kind: Any, mask: np.ndarray) -> None:
        """Write neighbors of a lane."""
        size = np.dtype(kind).itemsize
        words = np.stack([np.broadcast_to(np.asarray(value), LANES).astype(kind) for value in values], 1).copy()
        store, at = self._places(space, addresses, size * len(values), mask)
        places = at[:, None] + np.arange(size * len(values))
        store[places[mask]] = words.view(np.uint8).reshape(LANES, -1)[mask]

    def _places(self, space: str, addresses: np.ndarray, size: int, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if space == "global":
            return self.memory.bytes, self.memory.offsets(np.broadcast_to(addresses, LANES), size, mask)
        at = np.broadcast_to(addresses, LANES).astype(np.int64)
        if (at[mask] + size > self.shared.size).any() or (at[mask] % size).any():
            raise IndexError("an access outside of shared memory, or not aligned")
        return self.shared, np.where(mask, at, 0)

    def copy(self, to: np.ndarray, source: np.ndarray, size: int, mask: np.ndarray, given: Any = None) -> None:
        """An asynchronous copy: it is kept until somebody waits for it. ``given``: the size, or 0 for lanes that get zeros."""
        there = mask & (np.broadcast_to(size if given is None else given, LANES) != 0)
        at = np.where(there, self.memory.offsets(np.broadcast_to(source, LANES), size, there), 0)
        place = np.broadcast_to(to, LANES).astype(np.int64)
        if (place[mask] + size > self.shared.size).any() or (place[mask] % size).any():
            raise IndexError("a copy outside of shared memory")
        span = np.arange(size)
        self.shared[(place[:, None] + span)[mask]] = 0xFF
        self.copies[-1].append(((place[:, None] + span)[mask], (at[:, None] + span)[mask]))

    def commit(self) -> None:
        """Close a group of copies."""
        self.copies.append([])

    def wait(self, left: int) -> None:
        """Let all groups arrive but the newest ``left``."""
        while len(self.copies) - 1 > left:
            for to, source in self.copies.pop(0):
                self.shared[to] = self.memory.bytes[source]

    def atomic(self, name: str, kind: str, addresses: np.ndarray, value: Any, mask: np.ndarray) -> np.ndarray:
        """Lane after lane; the old values."""
        old = np.zeros(LANES, np.uint32)
        at = self.memory.offsets(np.broadcast_to(addresses, LANES), 4, mask)
        words, values = self.memory.bytes.view(np.uint32), np.broadcast_to(np.asarray(value, np.uint32), LANES)
        for lane in np.flatnonzero(mask):
            word = at[lane] // 4
            old[lane] = words[word]
            words[word] = words[word] + values[lane] if name == "add" else values[lane]
        return old


def run(program: Program, shared: int, warps: int, grid: tuple[int, int, int], memory: Memory, arguments: Sequence[int]) -> None:
    """Run a grid, one program after the other; ``arguments``: the bits of all parameters, those that nobody gives are 0."""
    given = [*arguments, *([0] * (len(program.parameters) - len(arguments)))]
    params = dict(zip(program.parameters, given, strict=True))
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    run_program(program, shared, warps, grid, (x, y, z), memory, params)


def run_program(
    program: Program, shared: int, warps: int, grid: Sequence[int], at: Sequence[int], memory: Memory, params: Mapping[str, int]
) -> None:
    """Run the warps of one program, all up to each barrier."""
    places_of, end = {}, -(-shared // 16) * 16
    for name, size in program.statics:
        places_of[name], end = np.full(LANES, end, np.uint32), end + -(-size // 16) * 16
    store = np.full(max(end, 16), 0xFF, np.uint8)
    every = [Warp(index, grid, at, memory, store, params) for index in range(warps)]
    for warp in every:
        warp.r.update(places_of)
    places: list[str | None] = [program.order[0]] * warps
    while any(place is not None for place in places):
        for index, warp in enumerate(every):
            place: Any = places[index]
            while place is not None:
                place = program.blocks[place](warp)
                if isinstance(place, tuple):
                    place = place[1]
                    break
            places[index] = place
        assert len({place is None for place in places}) == 1, "some warps ended before a barrier"
