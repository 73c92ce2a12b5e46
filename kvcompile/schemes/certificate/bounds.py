"""The bounds of certified attention, as sympy expressions: the one source of kernels, reports and documents.

Each ``Bound`` says what it bounds, why it holds and in which direction it must be rounded. The printer
(``lowering.certificate.bound_printer``) adds the rounding errors of its own arithmetic, so that printed code still bounds. Source:
"Runtime-Certified Bounded-Error Quantized Attention", sections 4 to 6, appendix A; forms of ours replace those of the paper that are loose
or do not hold as stated.

Setting, of one query of one head. The exact logits are s_t, those that the kernel computed s'_t, and
|s'_t - s_t| <= Delta_b for the tokens of block b. Softmax weights a_t and a'_t, block masses rho_b and rho'_b;
rho' is known, rho is not. A sink is a token of value zero whose logit is exact.

Theorem 1 (deviation of a logit; the paper's equation 8 and the form below it). A key channel decodes within
    radius_c = step_c / 2 + rounding of its original, so |s'_t - s_t| <= scale * sum_c |q_c| radius_c; and by
    Cauchy-Schwarz <= scale * |q|_2 * kappa_b with kappa_b = max_t |k_t - decoded k_t|_2, measured when the block is
    encoded. Neither is always the smaller (spread-out queries: the second, since the errors of the channels of one
    token are not all at their largest), so the smaller one is taken. Softcap is 1-Lipschitz and a bias cancels.
    Delta_b stays a number of its block: the paper takes the largest of all blocks.

Theorem 2 (key error, centered; replaces the paper's equation 15). Let eps_t = exp(s_t - s'_t) - 1 and
    m' = sum_t a'_t V_t. Then a_t = a'_t (1 + eps_t) / R with R = 1 + sum_t a'_t eps_t, and so EXACTLY
        sum_t (a_t - a'_t) V_t = (1 / R) sum_t a'_t eps_t (V_t - m'),
    where tokens with an exact logit drop out of the sum. Hence
        E_key <= sum_b rho'_b (exp(Delta_b) - 1) (nu_b + |m'|) / sum_b rho'_b exp(-Delta_b),
    with |m'| <= |O_quant| + E_val, which is known; nu_b the largest norm of the block's values.
    The paper has 2 Vmax exp(2 Delta) alpha (exp(2 Delta) - 1), alpha being the mass that the tail had when every
    block was scored in int8. Ours is never above it (|m'| <= Vmax, and the mass that the tail has in the end is at
    most exp(Delta) alpha), and is a quarter of it where |m'| is small beside Vmax and Delta is small.

Theorem 3 (total variation). TV(a, a') <= tanh(max_b Delta_b / 2), and TV(a, a') <= sum_b rho'_b (exp(Delta_b) - 1);
    E_key <= 2 Vmax TV (the paper's theorem 4.3). Proof: the ratios a_t / a'_t lie in [m, M] with M / m <= exp(2 Delta),
    since ALL of them share R. With ratio M on a set of a'-mass p and m on the rest, TV = p (M - 1), p M + (1 - p) m = 1,
    which is largest at p = 1 / (1 + exp(Delta)), where it is (exp(Delta) - 1) / (exp(Delta) + 1). Second form: if R >= 1
    the positive part of a - a' is at most sum a'_t (exp(Delta_b) - 1); if R < 1 that of a' - a is at most
    sum a'_t (1 - exp(-Delta_b)), which is smaller.
    The paper's lemma A.2 has tanh(Delta) and calls it attained: its extremal ratios exp(+-2 Delta) are not those of
    any logits within Delta (a factor of 2 for small Delta). Lemma A.3's alpha (exp(2 Delta) - 1) is loose likewise.

Theorem 4 (range). |O_ref - m'| <= Vmax + |m'|, whatever the logits: so no bound on the key error is ever above this.

Theorem 5 (value error; the paper's corollary 4.2). E_val <= sum_b rho'_b eta_b, eta_b = max_t |V_t - decoded V_t|_2,
    zero where original values are used.

Vmax: the paper takes it over the blocks that have a nu_b, which the trailing partial block has not; but key error
    moves mass onto those tokens too. Ours is over every visible token.

Theorem 6 (arithmetic). Errors of float32: n-term dot products are within n u sum |q_c k_c| of the exact ones, in any
    order of summation; this is part of Delta_b, for exact keys as well. exp(s' - m) is relatively within
    (|s' - m| + 8) u, sum_t x_t exp(-x_t) over a block is at most 16 / e, and a block's partial output within
    chain u sum a'_t |V_t|: ACCUMULATION. The output is rounded to the model's dtype: OUTPUT_ROUNDING.
    By tensor cores: a value is within HALF_STEP u |V_t| and, in each channel, HALF_TINY of what the scheme decodes; a weight is
    within 4 u + 2^-50, being two float16 numbers; 16 tokens are TENSOR_STEP steps, and a turn's sums are added like any number.
    The paper leaves all of this out, so its certificate need not bound its kernel's result in blocks with exact keys.

Theorem 7 (ranking). The exact log-mass of a block lies within Delta_b of the one from computed logits; so a tail block
    whose log-mass + Delta_b is not above the r-th largest log-mass of blocks with exact keys is not among the top r.
    The paper uses the largest Delta of all blocks here too.

Theorem 8 (consistency). Where both logits of a token are known, |s' - s| <= Delta_b + the rounding of both: a
    violation proves that the planes are not what was encoded. Checked blocks whose stored norms are also at least
    what the originals have satisfy every assumption above, corrupted or not.

Theorem 9 (tensor cores). PTX promises products of 16-bit floats that are exact and sums "with at least single precision", in an
    order and a rounding that it leaves open; measured (Fasi et al. 2021), addends are aligned to the largest and cut off.
    TENSOR_STEP = 48 allows an instruction of 16 products 24 additions, each of which cuts off 2 u of the sum of all magnitudes.
    A logit by codes is sum_c (q_c step_c) u_c + sum_c q_c low_c, u_c = code + 128 <= 255, low_c = zero_c - 128 step_c. The first
    sum's magnitudes add up to 255 sum_c |q_c| step_c <= 510 CHANNELS; it is rounded TERMS / 16 times so, and by
    less than 8 u for q_c step_c, its two limbs and what is added to it. For the second |low_c| <= |decoded_c| + 256 step_c, whatever
    was corrupted: the first part is in ROUNDING, the second at most 512 CHANNELS, with TERMS roundings, which are D + 8. The second
    sum's pairs of channels are rounded to 2^-29 of the most that all of them can be, 4 D |q_c| |low_c| of the largest: D^2 u / 64 in
    all; and subnormals of the first lose less than 2 u of the largest. Both are within mu where planes are as encoded, and
    blocks in which steps or low are beyond it have no logits.
"""

from __future__ import annotations

import dataclasses
import enum

import sympy


class Rise(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """1 - exp(-x) for x >= 0, evaluated without cancellation."""

    is_nonnegative = True

    def _eval_rewrite_as_exp(self, x: sympy.Expr, **_: object) -> sympy.Expr:
        return 1 - sympy.exp(-x)


class Outward(enum.Enum):
    """The direction in which rounding may move a bound."""

    UP = "up"
    DOWN = "down"


class BoundUnit(enum.Enum):
    """The unit (channel, block or head) for which a bound's expression is evaluated once."""

    CHANNEL = "channel"
    BLOCK = "block"
    HEAD = "head"


@dataclasses.dataclass(frozen=True)
class Bound:
    """An expression that bounds a quantity from one side. ``theorem``: the number in the module's docstring, with a note."""

    name: str
    expression: sympy.Expr
    outward: Outward
    over: BoundUnit
    theorem: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the expression's symbols, sorted."""
        return tuple(sorted(symbol.name for symbol in self.expression.free_symbols))


def _symbols(text: str) -> tuple[sympy.Symbol, ...]:
    made: tuple[sympy.Symbol, ...] = sympy.symbols(text, nonnegative=True)
    return made


UNIT = sympy.Float(2.0**-24)
"""Unit roundoff of float32."""

TINY = sympy.Float(2.0**-116)
"""More than a few hundred flushed float32 denormals add up to."""

TENSOR_STEP = 48
"""Rounding of a sum to which tensor cores add 16 products of 16-bit floats, in ``UNIT`` times the sum of all magnitudes: theorem 9."""

HALF_STEP = 2**13 + 2**6
"""Rounding, in ``UNIT`` times its magnitude, of a value decoded in float16: 2^-11 of it, and a margin for later roundings."""

HALF_TINY = 2.0**-25
"""Largest rounding error of a float16 number below the smallest normal one."""

STEP, ZERO, SCALE = _symbols("step zero scale")
"""A key channel's scale; the magnitude of its zero point; the magnitude of the factor of q . k."""

QUERY_NORM, KAPPA, MU, CHANNELS, TERMS, PEAK, CAP = _symbols("query_norm kappa mu channels terms peak cap")
"""|q|_2; the block's largest |k - decoded k|_2 and |k|_2; sum_c |q_c| radius_c; terms of a dot product; the largest |score| that has
weight, if a bias is added, else 0; the softcap, 0 for none."""

GAP = sympy.Symbol("gap", real=True)
WEIGHT, DELTA, NU, ETA, CENTER, VMAX = _symbols("weight delta nu eta center vmax")
"""gap and weight: sum_{t in b} exp(s'_t - m) = weight * exp(gap), gap being the block's largest logit minus the head's."""

KEY_SUM, SHIFT, DELTA_MAX, VALUE_SUM, CHAIN, NORM, OUT_UNIT, OUT_TINY = _symbols(
    "key_sum shift delta_max value_sum chain norm out_unit out_tiny"
)
LEAST, TOTAL = sympy.symbols("least total", positive=True)

LOG_MASS = sympy.Symbol("log_mass", real=True)
OWN, GUARD, TAIL = _symbols("own guard tail")
"""own: the rounding of a logit with exact keys."""

RADIUS = Bound(
    "radius", STEP / 2 + sympy.Float(2.0**-20) * (ZERO + 128 * STEP) + TINY, Outward.UP, BoundUnit.CHANNEL,
    "1: half a step; float32 rounding of (k - zero) / step, of code * step + zero and of the zero point, all below 2^-20 of their operands",
)
ROUNDING = Bound(
    "rounding", sympy.Float(1.01) * UNIT * (TERMS * SCALE * QUERY_NORM * (MU + KAPPA) + 4 * PEAK + 16 * CAP) + TINY * (1 + SCALE),
    Outward.UP, BoundUnit.BLOCK, "6: n-term dot product by Cauchy-Schwarz, addition of a bias, tanh of a softcap",
)
DEVIATION = Bound(
    "deviation", sympy.Min(SCALE * CHANNELS, SCALE * QUERY_NORM * KAPPA) + ROUNDING.expression, Outward.UP, BoundUnit.BLOCK,
    "1 and 6: Delta_b of a block whose keys are codes",
)
CODED = Bound(
    "coded",
    DEVIATION.expression + sympy.Float(1.01) * UNIT * SCALE * CHANNELS * (510 * (TENSOR_STEP * TERMS / 16 + 8) + 512 * TERMS)
    + sympy.Float(1.01) * UNIT * SCALE * QUERY_NORM * MU * (TERMS**2 / 64 + 2) + TINY * SCALE * QUERY_NORM,
    Outward.UP, BoundUnit.BLOCK, "1, 6 and 9: Delta_b of a block of codes that are multiplied on tensor cores",
)
KEY_TERM = Bound(
    "key_term", WEIGHT * sympy.exp(GAP + DELTA) * Rise(DELTA) * (NU + CENTER), Outward.UP, BoundUnit.BLOCK,
    "2: numerator, times the common exp(m); exp(Delta) (1 - exp(-Delta)) is exp(Delta) - 1 without cancellation",
)
LEAST_TERM = Bound("least_term", WEIGHT * sympy.exp(GAP - DELTA), Outward.DOWN, BoundUnit.BLOCK, "2: denominator, R at least")
MOST_TERM = Bound(
    "most_term", WEIGHT * sympy.exp(GAP + DELTA), Outward.UP, BoundUnit.BLOCK, "1: mass of a block at most, before normalization"
)
SHIFT_TERM = Bound(
    "shift_term", WEIGHT * sympy.exp(GAP + DELTA) * Rise(DELTA), Outward.UP, BoundUnit.BLOCK, "3: numerator of the second form"
)
TOTAL_TERM = Bound("total_term", WEIGHT * sympy.exp(GAP), Outward.DOWN, BoundUnit.BLOCK, "5: mass of a block before normalization")
VALUE_TERM = Bound("value_term", WEIGHT * sympy.exp(GAP) * ETA, Outward.UP, BoundUnit.BLOCK, "5: numerator")
ACCUMULATION_TERM = Bound(
    "accumulation_term", WEIGHT * sympy.exp(GAP) * UNIT * (CHAIN + 2 * sympy.Abs(GAP)) * (NU + ETA + VMAX), Outward.UP, BoundUnit.BLOCK,
    "6: numerator; chain: rounding steps between a product and the output, and those of exp",
)
KEY = Bound(
    "key", sympy.Min(KEY_SUM / LEAST, 2 * VMAX * sympy.Min(SHIFT / TOTAL, sympy.tanh(DELTA_MAX / 2)), VMAX + CENTER) + TINY,
    Outward.UP, BoundUnit.HEAD, "2, 3 and 4: the least of the centered bound, twice Vmax times the total variation, and the range",
)
VALUE = Bound("value", VALUE_SUM / TOTAL, Outward.UP, BoundUnit.HEAD, "5")
CENTER_NORM = Bound(
    "center_norm", sympy.Min(NORM + VALUE_SUM, VMAX), Outward.UP, BoundUnit.HEAD, "2: |m'| <= |O_quant| + E_val + rounding, and <= Vmax"
)
ACCUMULATION = Bound("accumulation", VALUE_SUM / TOTAL + TINY, Outward.UP, BoundUnit.HEAD, "6")
OUTPUT_ROUNDING = Bound("output_rounding", OUT_UNIT * NORM + OUT_TINY, Outward.UP, BoundUnit.HEAD, "6: unit roundoff of the output's dtype")
LARGEST_LOG_MASS = Bound("largest_log_mass", LOG_MASS + DELTA, Outward.UP, BoundUnit.BLOCK, "7")
CONSISTENT = Bound("consistent", DELTA + OWN + GUARD, Outward.UP, BoundUnit.BLOCK, "8")

BOUNDS: tuple[Bound, ...] = (
    RADIUS, ROUNDING, DEVIATION, CODED, KEY_TERM, LEAST_TERM, MOST_TERM, SHIFT_TERM, TOTAL_TERM, VALUE_TERM, ACCUMULATION_TERM, KEY, VALUE,
    CENTER_NORM, ACCUMULATION, OUTPUT_ROUNDING, LARGEST_LOG_MASS, CONSISTENT,
)
"""All bounds that a certificate consists of."""

SOURCE_KEY = 2 * VMAX * sympy.exp(2 * DELTA_MAX) * TAIL * (sympy.exp(2 * DELTA_MAX) - 1)
"""The paper's equation 15, for comparison only. tail: the mass of the unpromoted blocks, estimated from int8 scores alone."""
