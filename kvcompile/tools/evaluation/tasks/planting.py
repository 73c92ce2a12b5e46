"""Planting: inserts a plan's lines at random depths of real text, which is cut so that the whole has exactly the requested length.

A ``Writing`` defines the units of prompts: bytes, or ids of a tokenizer. Planted lines are lines of their own in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from kvcompile.errors import QuestionTooLong
from kvcompile.tools.evaluation.tasks.plans import TaskPlan

Filler = bytes | np.ndarray
"""Real text to hide statements in: bytes, or a uint8 array of shape (N,)."""

SNAP = 160
"""Distance in bytes after a drawn offset within which a line break is looked for, to plant between whole lines."""

Units = TypeVar("Units", bytes, tuple[int, ...])


class Writing(Protocol[Units]):
    """Units of prompts (bytes, a tokenizer's ids), and the conversion of text to units."""

    unit: str

    def write(self, text: bytes) -> Units:
        """Return a text as units: bytes or ids."""

    def take(self, filler: Sequence[int] | np.ndarray, start: int, stop: int) -> Units:
        """Return ``filler[start:stop]`` as units."""

    def join(self, pieces: Iterable[Units]) -> Units:
        """Return the pieces, units each, as one piece."""

    def place(self, raw: Units, offset: int) -> int:
        """Return the index of the line break at or soon after an offset, or the offset if there is none."""


class BytesWriting:
    """Prompts of bytes."""

    unit = "bytes"

    def write(self, text: bytes) -> bytes:
        """Return the text unchanged."""
        return text

    def take(self, filler: Sequence[int] | np.ndarray, start: int, stop: int) -> bytes:
        """Return ``filler[start:stop]`` as bytes."""
        return bytes(filler[start:stop])

    def join(self, pieces: Iterable[bytes]) -> bytes:
        """Return the pieces as one bytes object."""
        return b"".join(pieces)

    def place(self, raw: bytes, offset: int) -> int:
        """Return the index of the first line break among the ``SNAP`` bytes from ``offset`` on; ``offset`` if there is none."""
        end = raw.find(b"\n", offset, offset + SNAP)
        return offset if end < 0 else end


BYTES = BytesWriting()


def cut(rng: random.Random, filler: Filler, length: int) -> bytes:
    """Return a random piece of `length` bytes of the filler, repeated if the filler is shorter."""
    return piece(BYTES, rng, filler, length)


def piece(writing: Writing[Units], rng: random.Random, filler: Sequence[int] | np.ndarray, length: int) -> Units:
    """Return a random piece of ``length`` units of the filler, repeated if the filler is shorter. Raises QuestionTooLong for no filler."""
    if not len(filler):
        raise QuestionTooLong(needed=length, unit=f"{writing.unit} of filler text", found=0, todo="pass --data with more text")
    start = rng.randrange(max(1, len(filler) - length + 1))
    pieces = [writing.take(filler, start, start + length)]
    missing = length - len(pieces[0])
    while missing > 0:
        pieces.append(writing.take(filler, 0, missing))
        missing -= len(pieces[-1])
    return writing.join(pieces)


def plant(rng: random.Random, plan: TaskPlan, filler: Filler, length: int, depth: float | None = None) -> tuple[bytes, float]:
    """Return filler with the plan's lines in it, exactly `length` bytes, and the depth of the first line of group 0.

    Lines are placed uniformly over the text; with `depth`, the first line of group 0 comes after that share of the filler, and the group's
    other lines uniformly after it. Raises QuestionTooLong.
    """
    return planted(BYTES, rng, plan, filler, length, depth)


def planted(
    writing: Writing[Units], rng: random.Random, plan: TaskPlan, filler: Sequence[int] | np.ndarray, length: int, depth: float | None = None
) -> tuple[Units, float]:
    """Return the result of ``plant`` in units of ``writing``; ``length``: number of units of the text. Raises QuestionTooLong."""
    lines = [[writing.write(b"\n" + line + b"\n") for line in group] for group in plan.groups]
    needed = sum(len(line) for group in lines for line in group)
    room = length - needed
    if room < 0:
        raise QuestionTooLong(needed=needed, unit=writing.unit, found=length, todo="raise the length, or leave the task out")
    raw = piece(writing, rng, filler, room) if room else writing.join(())
    placed: list[tuple[int, int, Units]] = []
    for number, group in enumerate(lines):
        offsets = sorted(rng.randint(0, room) for _ in group)
        if number == 0 and depth is not None:
            offsets = _behind(min(room, int(depth * room)), offsets[1:], room)
        placed += [(writing.place(raw, offset), number, line) for offset, line in zip(offsets, group, strict=True)]
    placed.sort(key=lambda item: item[0])
    pieces: list[Units] = []
    done = used = 0
    first: int | None = None
    for offset, number, line in placed:
        pieces += (raw[done:offset], line)
        if number == 0 and first is None:
            first = offset + used
        done, used = offset, used + len(line)
    pieces.append(raw[done:])
    return writing.join(pieces), (first or 0) / max(1, length)


def _behind(start: int, offsets: list[int], room: int) -> list[int]:
    """Return ``start``, followed by offsets from 0 to ``room`` rescaled to ``start`` to ``room``."""
    return [start, *(start + offset * (room - start) // max(1, room) for offset in offsets)]
