"""Budget: the bytes of a token at each width, and the bytes that a layer may spend (sections 2.2, 5.1, 10.1, 10.2).

A budget is a fraction of the layer's bytes in 16 bits. It counts stored bytes: codes, scales, and the bytes of a token that do not depend
on its width (its position). The formulas are sympy expressions, evaluated to numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from kvcompile.errors import BadOption
from kvcompile.extensions.smartkv.codes import WIDTHS

BITS, HEAD_DIM, SCALE_BYTES, HEADS = sympy.symbols("bits head_dim scale_bytes heads", positive=True)

KEY_OR_VALUE_BYTES = HEADS * (HEAD_DIM * BITS / 8 + SCALE_BYTES)
"""Stored bytes of the keys or the values of one token (2.2, with one scale for a head)."""

DENSE_BYTES = 2 * HEADS * HEAD_DIM * 2
"""Bytes of the keys and values of one token in 16 bits."""


@dataclass(frozen=True)
class KeyValueWidths:
    """The widths that keys and values may have, both ascending. They are separate since a key's error goes through the softmax.

    Raises BadOption unless each is an ascending choice of ``WIDTHS``.
    """

    keys: tuple[int, ...] = WIDTHS
    values: tuple[int, ...] = WIDTHS

    def __post_init__(self) -> None:
        for name, widths in (("keys", self.keys), ("values", self.values)):
            if not widths or tuple(sorted(set(widths))) != widths or not set(widths) <= set(WIDTHS):
                raise BadOption(
                    scheme="smartkv", option=f"{name} widths", expected=f"some of {WIDTHS}, ascending", found=widths,
                    todo="keys of (3, 4, 8) and values of (2, 3, 4, 8) are what the paper suggests",
                )

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield self.keys
        yield self.values


@functools.cache
def _key_or_value_bytes(heads: int, head_dim: int, bits: int, scale_bytes: int) -> int:
    """Return the value of ``KEY_OR_VALUE_BYTES``, cached: every allocation needs it and sympy is slow."""
    return int(KEY_OR_VALUE_BYTES.subs({HEADS: heads, HEAD_DIM: head_dim, BITS: bits, SCALE_BYTES: scale_bytes}))


@dataclass(frozen=True)
class Cost:
    """The bytes of one layer's tokens: ``heads`` kv heads, ``scale_bytes`` per scale.

    ``beside``: the bytes of a token that do not depend on its widths.
    """

    heads: int
    head_dim: int
    scale_bytes: int = 2
    beside: int = 4

    def key_or_value(self, bits: int) -> int:
        """Return the stored bytes of one token's keys, or of its values, at a width."""
        return _key_or_value_bytes(self.heads, self.head_dim, bits, self.scale_bytes)

    def token(self, keys: int, values: int) -> int:
        """Return the stored bytes of one token, with ``keys`` and ``values`` bits per channel."""
        return self.key_or_value(keys) + self.key_or_value(values) + self.beside

    @property
    def dense(self) -> int:
        """Bytes of one token in 16 bits."""
        return int(DENSE_BYTES.subs({HEADS: self.heads, HEAD_DIM: self.head_dim}))

    def least(self, widths: KeyValueWidths) -> float:
        """Return the smallest budget that can be met, as a fraction of the bytes in 16 bits: with every token at its least widths."""
        return self.token(widths.keys[0], widths.values[0]) / self.dense

    def most(self, widths: KeyValueWidths) -> float:
        """Return the largest useful budget, as a fraction of the bytes in 16 bits: with every token at its largest widths."""
        return self.token(widths.keys[-1], widths.values[-1]) / self.dense

    def check(self, budget: float, widths: KeyValueWidths) -> None:
        """Raise BadOption if ``budget`` is below ``least(widths)``."""
        least = self.least(widths)
        if not budget >= least:
            raise BadOption(
                scheme="smartkv", option="budget", expected=f"at least {least:.4f} with {self.head_dim} channels a head, scales of "
                f"{8 * self.scale_bytes} bits and widths from {widths.keys[0]} and {widths.values[0]} bits", found=budget,
                todo=f"pass budget={_above(least)}, or allow narrower codes",
            )


def _above(least: float) -> float:
    """Return ``least`` rounded up to two decimals."""
    return math.ceil(round(least * 100, 10)) / 100


@dataclass(frozen=True)
class Phases:
    """A budget that changes once with the number of tokens (10.1): ``below`` under ``threshold`` tokens, ``above`` from there on."""

    below: float
    above: float
    threshold: int

    def at(self, tokens: int) -> float:
        """Return the budget at a number of tokens."""
        return self.below if tokens < self.threshold else self.above


def layer_budgets(budget: float, weights: Sequence[float], least: float, most: float) -> list[float]:
    """Return a budget for each layer, in proportion to its weight between ``least`` and ``most``, with mean ``budget`` (10.2).

    A layer clamped to ``least`` or ``most`` changes the shares of the others, so that the mean is met; a ``budget`` below ``least`` or
    above ``most`` is clamped for all layers. Raises BadOption unless all weights are positive.
    """
    if not all(weight > 0 for weight in weights):
        raise BadOption(
            scheme="smartkv", option="layer weights", expected="a positive number for every layer", found=list(weights),
            todo="a layer that matters little gets a small weight, none gets zero",
        )
    if not least <= budget <= most:
        return [min(max(budget, least), most)] * len(weights)
    # The sum grows with the factor: bisection finds the one that meets the whole.
    low, high = 0.0, most / min(weights)
    for _ in range(200):
        middle = (low + high) / 2
        found = [min(max(middle * weight, least), most) for weight in weights]
        low, high = (middle, high) if sum(found) < budget * len(weights) else (low, middle)
    return [min(max(low * weight, least), most) for weight in weights]
