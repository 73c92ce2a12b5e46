"""Adaptation: what an adaptive scheme did with the tokens of one length's first text, as plain data that JSON holds.

``Watch`` reads the stores between decode steps, by what the backend says of them; no scheme is known here, and nothing is added to a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvcompile.backend import Backend
from kvcompile.types import Role

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""One character for the bits of a token."""

LOOKS, SPANS = 64, 256
"""The most steps after which importance is read, and spans of positions that it is told of."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Adaptation:
    """Widths and importance of one length's tokens.

    ``layers``: module paths. ``keys``, ``values``: a text for each layer, a character of ``DIGITS`` for the bits of each token of the
    first text once it was decoded. ``histogram``: tokens of all texts and layers by role and bits. ``steps``: decode steps after which
    importance was read. ``importance``: at each of them the means over layers and ``span`` positions of the first text, in means of all its
    tokens; the last span may be shorter, and spans that have no token yet are missing. ``decided``: those steps since whose predecessor
    some layer's widths were decided anew.
    """

    length: int
    layers: tuple[str, ...]
    keys: tuple[str, ...]
    values: tuple[str, ...]
    histogram: dict[str, dict[str, int]]
    span: int
    steps: tuple[int, ...]
    importance: tuple[tuple[float, ...], ...]
    decided: tuple[int, ...]

    def bits(self, role: str) -> list[list[int]]:
        """Bits of each token by layer, of ``keys`` or ``values``."""
        return [[DIGITS.index(digit) for digit in row] for row in getattr(self, role)]


class Watch:
    """Reads the stores of a backend while ``tail`` tokens are decoded behind ``length`` units of ``prompt`` tokens."""

    def __init__(self, owner: Backend, length: int, prompt: int, tail: int) -> None:
        self.owner, self.length, self.tail = owner, length, tail
        self.span = -(-(prompt + tail) // SPANS)
        self.every = -(-tail // LOOKS)
        self.steps: list[int] = []
        self.importance: list[tuple[float, ...]] = []
        self.decided: list[int] = []
        self.allocations = 0

    def over(self, steps: Iterator[Item]) -> Iterator[Item]:
        """The steps as they are; the stores are read behind some of them, the last one among these."""
        for number, item in enumerate(steps, 1):
            if number % self.every == 0 or number in {1, self.tail}:
                self._look(number)
            yield item

    def _look(self, number: int) -> None:
        """Read importance after a step."""
        found = [(item, rows) for item in self.owner.stored_tokens() if item.count and (rows := item.attended) is not None]
        if not found:
            return
        allocations = sum(item.churn.allocations for item, _ in found)
        if allocations > self.allocations:
            self.decided.append(number)
        self.allocations = allocations
        most = max(rows.shape[1] for _, rows in found)
        alike = [rows[0].double() for _, rows in found if rows.shape[1] == most]
        spans = torch.stack(alike).mean(0).split(self.span)
        self.steps.append(number)
        self.importance.append(tuple(float(f"{float(each.mean()):.4g}") for each in spans))

    def adaptation(self) -> Adaptation | None:
        """Return what was seen, with the widths that tokens have now; None where no store's tokens change theirs."""
        held = [item for item in self.owner.stored_tokens() if item.count]
        if not held or not self.steps:
            return None
        keys, values = ([item for item in held if item.role is role] for role in (Role.KEY, Role.VALUE))
        bits = {name: [item.bits for item in half] for name, half in (("keys", keys), ("values", values))}
        return Adaptation(
            self.length, tuple(item.path for item in keys), _texts(bits["keys"]), _texts(bits["values"]),
            {name: _histogram(half) for name, half in bits.items()}, self.span, tuple(self.steps), tuple(self.importance),
            tuple(self.decided),
        )


def _texts(bits: list[torch.Tensor]) -> tuple[str, ...]:
    """A character for each token of the first row of each layer."""
    return tuple("".join(DIGITS[each] for each in rows[0].tolist()) for rows in bits)


def _histogram(bits: list[torch.Tensor]) -> dict[str, int]:
    """Tokens by bits, over layers and rows; JSON has no other keys than texts."""
    widths, counts = torch.cat([rows.flatten() for rows in bits]).unique(return_counts=True)
    return {str(width): count for width, count in zip(widths.tolist(), counts.tolist(), strict=True)}
