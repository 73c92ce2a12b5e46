"""Adaptation: the widths and importance that an adaptive scheme gave to tokens, for one length of prompts, as plain data for JSON.

``Watch`` reads the stores between decode steps through the backend. It names no scheme and adds nothing to a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvcompile.backend import Backend
from kvcompile.types import Role

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Characters that encode the bits of a token."""

LOOKS, SPANS = 64, 256
"""Largest number of steps after which importance is read, and of spans of positions that it is averaged over."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Adaptation:
    """Widths and importance of the tokens of texts with one length of prompt.

    ``layers``: module paths.
    ``keys``, ``values``: one text per layer, one character of ``DIGITS`` for the bits of each token of the first text, after decoding.
    ``histogram``: tokens of all texts and layers by role and bits.
    ``steps``: decode steps after which importance was read.
    ``importance``: for each of these, the mean over layers and over ``span`` positions of the first text, relative to the mean of its
        tokens. The last span may be shorter; spans without tokens are missing.
    ``decided``: the entries of ``steps`` at which some layer's widths had been decided anew since the entry before.
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
        """Return the bits of each token by layer; ``role``: "keys" or "values"."""
        return [[DIGITS.index(digit) for digit in row] for row in getattr(self, role)]


class Watch:
    """Reads the stores of a backend while ``tail`` tokens are decoded after a prompt of ``prompt`` tokens, ``length`` units."""

    def __init__(self, owner: Backend, length: int, prompt: int, tail: int) -> None:
        self.owner, self.length, self.tail = owner, length, tail
        self.span = -(-(prompt + tail) // SPANS)
        self.every = -(-tail // LOOKS)
        self.steps: list[int] = []
        self.importance: list[tuple[float, ...]] = []
        self.decided: list[int] = []
        self.allocations = 0

    def over(self, steps: Iterator[Item]) -> Iterator[Item]:
        """Yield ``steps`` unchanged; read the stores after some of them, the last one included."""
        for number, item in enumerate(steps, 1):
            if number % self.every == 0 or number in {1, self.tail}:
                self._look(number)
            yield item

    def _look(self, number: int) -> None:
        """Record the importance of stored tokens after step ``number``, and the step itself if widths were decided since the last one."""
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
        """Return the readings, with the tokens' final widths, as a record; None if no store is adaptive."""
        held = [item for item in self.owner.stored_tokens() if item.count]
        if not held or not self.steps:
            return None
        keys, values = ([item for item in held if item.role is role] for role in (Role.KEY, Role.VALUE))
        bits = {name: [item.bits for item in key_or_value] for name, key_or_value in (("keys", keys), ("values", values))}
        return Adaptation(
            self.length, tuple(item.path for item in keys), _texts(bits["keys"]), _texts(bits["values"]),
            {name: _histogram(key_or_value) for name, key_or_value in bits.items()}, self.span, tuple(self.steps), tuple(self.importance),
            tuple(self.decided),
        )


def _texts(bits: list[torch.Tensor]) -> tuple[str, ...]:
    """Return one text per layer, with one character for the bits of each token of the first row."""
    return tuple("".join(DIGITS[each] for each in rows[0].tolist()) for rows in bits)


def _histogram(bits: list[torch.Tensor]) -> dict[str, int]:
    """Return tokens by bits, over layers and rows; keys are text, as in JSON."""
    widths, counts = torch.cat([rows.flatten() for rows in bits]).unique(return_counts=True)
    return {str(width): count for width, count in zip(widths.tolist(), counts.tolist(), strict=True)}
