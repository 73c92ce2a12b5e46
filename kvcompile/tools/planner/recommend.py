"""Recommendation: of the schemes that fit, the one with the least measured damage, with its figures as reasons.

The rules follow an article's decision guide, with measured figures in place of its fixed order of formats:

1. A scheme must fit: that many requests of that many tokens, with weights, prompts and overhead. 2. Its damage must have been measured
(``figures.json``). 3. Eight-bit floats are skipped on hardware that converts them in software (before sm_89). 4. Least damage comes first;
among schemes of equal damage, fewest bytes. Damages are equal if they differ by no more than ``dense`` differs from the uncompressed model,
which is rounding. 5. Separately, the scheme with the largest batch among those whose damage is within a limit set by the user.

"KV Cache Quantization: FP8, INT8, INT4, ...", Decision Framework, takes the first of FP8, INT8, INT4 that fits, and never the dense cache;
its order of the first two does not agree with our measurements.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvcompile.tools.planner.capacity import Demand
from kvcompile.tools.planner.figures import Damage, Figures, Speed
from kvcompile.tools.planner.stores import Stores

EQUAL = 1e-6
"""KL in nats below which schemes count as equal: a smaller difference in float32 cannot be measured."""


class Generation(enum.Enum):
    """GPU generation, by compute capability."""

    AMPERE = "sm_80"
    ADA = "sm_89"
    HOPPER = "sm_90"
    BLACKWELL = "sm_100"

    @property
    def converts_floats(self) -> bool:
        """Whether the GPU has an instruction that converts eight-bit floats (PTX cvt, from sm_89 on)."""
        return self is not Generation.AMPERE


@dataclass(frozen=True)
class Option:
    """One scheme's stores with their needs and limits under a demand; ``e4m3``: whether codes are eight-bit floats."""

    label: str
    stores: Stores
    e4m3: bool
    largest_batch: int
    longest_context: int
    fits: bool
    damage: Damage | None
    speed: Speed | None

    @staticmethod
    def of(label: str, stores: Stores, demand: Demand, known: Figures) -> Option:
        """Return the option for a scheme's stores: its largest batch and longest context under ``demand``, and its figures."""
        held = [(item.scheme, item.slot.head_dim) for item in stores.stored if item.scheme is not None]
        kinds = [scheme.absmax(head_dim) or scheme.static(head_dim) for scheme, head_dim in held]
        return Option(
            label, stores, any(kind is not None and kind.e4m3 for kind in kinds), demand.largest_batch(stores),
            demand.longest_context(stores), demand.fits(stores, demand.batch, demand.context), known.damage(label, demand.context),
            known.timed(label, demand.batch, demand.context),
        )


@dataclass(frozen=True)
class Recommendation:
    """The recommended scheme, None if none fits; the one for most requests within the limit; and the reasons as sentences."""

    scheme: str | None
    most_requests: str | None
    reasons: tuple[str, ...]


def recommend(options: Sequence[Option], demand: Demand, generation: Generation, limit: float) -> Recommendation:
    """Return which of ``options`` to use, and which serves the most requests; ``limit``: the largest KL, in nats, of the latter."""
    passed = [] if generation.converts_floats else [item.label for item in options if item.e4m3]
    known = [item for item in options if item.damage is not None and item.label not in passed]
    skipped = [f"{', '.join(passed)} passed over: {generation.value} converts eight-bit floats in software"] if passed else []
    unmeasured = [item.label for item in options if item.damage is None and item.fits]
    skipped += [f"not considered, as their damage was not measured: {', '.join(unmeasured)}"] if unmeasured else []
    fitting = [item for item in known if item.fits]
    more = max((item for item in known if _kl(item) <= limit), key=lambda item: (item.largest_batch, -_kl(item)), default=None)
    more_label = more.label if more is not None and more.largest_batch else None
    if not fitting:
        reasons = [f"no measured scheme fits {demand.batch} x {demand.context:,} tokens: {_most(known)}", *skipped]
        return Recommendation(None, more_label, tuple(reasons))
    least = min(_kl(item) for item in fitting)
    best = min((item for item in fitting if _kl(item) <= least + _noise(item)), key=lambda item: _bytes(item, demand))
    reasons = [f"{best.label} has the least measured damage of {len(fitting)} schemes that fit: {_harm(best)}"]
    reasons += _unfit(known, best, demand)
    if best.speed is not None and best.speed.ms != best.speed.dense_ms:
        reasons.append(_pace(best.label, best.speed))
    if more is None or more.largest_batch < best.largest_batch:
        more_label = None
        reasons.append(f"nothing within a KL of {limit:g} nats serves as many requests: {best.largest_batch}")
    elif more_label != best.label:
        reasons.append(
            f"{more.label} serves the most requests within a KL of {limit:g} nats: {more.largest_batch} where {best.label} serves "
            f"{best.largest_batch}; {_harm(more)}"
        )
    if best.damage is not None and best.damage.beyond:
        reasons.append(
            f"damage was measured up to prompts of {best.damage.measured:,} bytes of {best.damage.model}, a byte-level model of 4.8M "
            f"parameters: at {demand.context:,} tokens and for this model it is not known; measure it with kvcompile sensitivity"
        )
    return Recommendation(best.label, more_label, (*reasons, *skipped))


def _kl(item: Option) -> float:
    assert item.damage is not None
    return item.damage.kl


def _noise(item: Option) -> float:
    assert item.damage is not None
    return max(EQUAL, item.damage.noise)


def _bytes(item: Option, demand: Demand) -> int:
    return item.stores.device_bytes(demand.batch, demand.context)


def _harm(item: Option) -> str:
    found = item.damage
    assert found is not None
    return (
        f"KL {found.kl:.2g} nats, same next byte {found.same}/{found.predictions}, answers {found.answers}/{found.questions} where dense "
        f"has {found.of_dense} ({found.command}; kvcompile/tools/planner/figures.json)"
    )


def _pace(label: str, found: Speed) -> str:
    return (
        f"attention with {label} takes {found.ms / found.dense_ms:.2f} of the time of dense at {found.batch} x {found.tokens:,} tokens "
        f"({found.device}, {found.file})"
    )


def _unfit(known: Sequence[Option], best: Option, demand: Demand) -> list[str]:
    """Return [a sentence that lists the schemes with less damage than ``best`` that do not fit], or [] if there are none."""
    better = [item for item in known if _kl(item) + _noise(best) < _kl(best) and not item.fits]
    if not better:
        return []
    listed = ", ".join(f"{item.label} ({demand.needed(item.stores, demand.batch, demand.context) / 1e9:.1f} GB)" for item in better)
    return [f"with less damage, but not within {demand.memory / 1e9:.1f} GB: {listed}"]


def _most(known: Sequence[Option]) -> str:
    best = max(known, key=lambda item: item.largest_batch, default=None)
    if best is None or not best.largest_batch:
        return "not even one request; use fewer tokens, smaller weights or several GPUs"
    return f"{best.label} holds the most, {best.largest_batch} requests; use fewer tokens, smaller weights or several GPUs"
