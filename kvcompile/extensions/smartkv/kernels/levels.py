"""The kernel that decides levels: ``smartkv.allocation.by_sorting`` by bisection, one program per row."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913, RUF005, RUF059 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

TOP = tl.constexpr(0x7F800000)
"""The bits of infinity; positive floats are ordered as their bits are."""


@triton.jit
def _price(VALUE, LEVEL, CAP, WORTHS, PRICES, bits, tokens, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bytes of all steps of a row's tokens, each from the token's level up to its cap, whose worth is at least a threshold.

    ``bits``: the threshold, as the bits of a float32. VALUE, LEVEL, CAP: the row's entries, ``tokens`` each. WORTHS, PRICES: the worth and
    the bytes of each of STEPS steps.
    """
    threshold = bits.to(tl.float32, bitcast=True)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        value = tl.load(VALUE + t, mask=t < tokens, other=0.0)
        level, cap = tl.load(LEVEL + t, mask=t < tokens, other=0), tl.load(CAP + t, mask=t < tokens, other=0)
        for step in tl.static_range(STEPS):
            taken = (value * tl.load(WORTHS + step) >= threshold) & (level <= step) & (cap > step)
            total += tl.where(taken, tl.load(PRICES + step), 0)
    return tl.sum(total, 0)


@triton.jit
def _climb(VALUE, LEVEL, CAP, WORTHS, bits, tokens, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Raise LEVEL [tokens] in place, up to each token's CAP, by every step with a worth of at least a threshold.

    ``bits``: the threshold, as the bits of a float32. The other operands are as in ``_price``.
    """
    threshold = bits.to(tl.float32, bitcast=True)
    for start in range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        value = tl.load(VALUE + t, mask=t < tokens, other=0.0)
        level, cap = tl.load(LEVEL + t, mask=t < tokens, other=0), tl.load(CAP + t, mask=t < tokens, other=0)
        new = level.to(tl.int32)
        for step in tl.static_range(STEPS):
            new += ((value * tl.load(WORTHS + step) >= threshold) & (level <= step) & (cap > step)).to(tl.int32)
        tl.store(LEVEL + t, new.to(tl.int8), mask=t < tokens)


@triton.jit
def _equals(VALUE, LEVEL, CAP, WORTHS, t, bits, tokens, step):
    """Return whether the next step of each token at ``t`` is ``step``, below the cap, and worth exactly the float32 with these ``bits``."""
    value = tl.load(VALUE + t, mask=t < tokens, other=0.0) * tl.load(WORTHS + step)
    level, cap = tl.load(LEVEL + t, mask=t < tokens, other=-1), tl.load(CAP + t, mask=t < tokens, other=-1)
    return (value == bits.to(tl.float32, bitcast=True)) & (level == step) & (cap > step)


@triton.jit(do_not_specialize=["tokens"])
def choose_levels(
    VALUE, SPEND, LOW, HIGH, LEVEL, CAP, WORTHS, PRICES, tokens, STEPS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write LEVEL int8 [R, T] between LOW and HIGH, for at most SPEND bytes per row beyond those of LOW; CAP int8 [R, T] is scratch.

    A program has one row. VALUE float32 [R, T], positive, times a step's worth WORTHS (float32) orders the steps; PRICES int64: a step's
    bytes. A round ends at the first step that does not fit; the next round takes cheaper steps only. STEPS: levels less one; ROUNDS: rounds
    at most.
    """
    row = tl.program_id(0).to(tl.int64) * tokens
    VALUE, LOW, HIGH, LEVEL, CAP = VALUE + row, LOW + row, HIGH + row, LEVEL + row, CAP + row
    left = tl.load(SPEND + tl.program_id(0))
    for start in range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        tl.store(LEVEL + t, tl.load(LOW + t, mask=t < tokens, other=0), mask=t < tokens)
        tl.store(CAP + t, tl.load(HIGH + t, mask=t < tokens, other=0), mask=t < tokens)
    dear = left * 0 - 1
    for _ in range(ROUNDS):
        # After the first round ``dear`` is the price of the step that did not fit; 0 ends the rounds, since every step fitted.
        if dear != 0:
            if dear > 0:
                for start in range(0, tokens, BLOCK):
                    t = start + tl.arange(0, BLOCK)
                    level, cap = tl.load(LEVEL + t, mask=t < tokens, other=0), tl.load(CAP + t, mask=t < tokens, other=0)
                    reached = level.to(tl.int32)
                    for step in tl.static_range(STEPS):
                        reached += ((reached == step) & (cap > step) & (tl.load(PRICES + step) < dear)).to(tl.int32)
                    tl.store(CAP + t, reached.to(tl.int8), mask=t < tokens)
            tl.debug_barrier()
            below, above = row.to(tl.int32) * 0, row.to(tl.int32) * 0 + TOP
            for _ in range(31):
                middle = below + (above - below) // 2
                fits = _price(VALUE, LEVEL, CAP, WORTHS, PRICES, middle, tokens, STEPS, BLOCK) <= left
                below, above = tl.where(fits, below, middle), tl.where(fits, middle, above)
            left -= _price(VALUE, LEVEL, CAP, WORTHS, PRICES, above, tokens, STEPS, BLOCK)
            _climb(VALUE, LEVEL, CAP, WORTHS, above, tokens, STEPS, BLOCK)
            tl.debug_barrier()
            # Some of the steps with the next smaller worth may fit; the newest tokens come first.
            dear = left * 0
            for step in range(STEPS):
                if dear == 0:
                    price = tl.load(PRICES + step)
                    number = left * 0
                    for start in range(0, tokens, BLOCK):
                        t = start + tl.arange(0, BLOCK)
                        number += tl.sum(_equals(VALUE, LEVEL, CAP, WORTHS, t, above - 1, tokens, step).to(tl.int64), 0)
                    most = tl.minimum(number, tl.maximum(left, 0) // price)
                    seen = left * 0
                    for block in range(tl.cdiv(tokens, BLOCK)):
                        t = (tl.cdiv(tokens, BLOCK) - 1 - block) * BLOCK + tl.arange(0, BLOCK)
                        equal = _equals(VALUE, LEVEL, CAP, WORTHS, t, above - 1, tokens, step)
                        behind = tl.cumsum(equal.to(tl.int64), 0, reverse=True)
                        taken = equal & (seen + behind <= most)
                        tl.store(LEVEL + t, (step + 1 + t * 0).to(tl.int8), mask=taken)
                        seen += tl.sum(equal.to(tl.int64), 0)
                    left -= most * price
                    dear = tl.where(most < number, price, dear)
                    tl.debug_barrier()
