"""Recommendation: of the schemes that fit, the one with the least measured damage, with the figures that say so.

The rules, after the source's decision guide, with measured figures in place of its fixed order of formats:

1. A scheme must fit: so many requests of so many tokens, beside weights, prompts and overhead.
2. Its damage must have been measured (``figures.json``); nothing is recommended on a promise.
3. Eight-bit floats are passed over where the hardware converts them in software (before sm_89).
4. Least damage comes first; of schemes equal in it, the one with fewer bytes. Equal are those that differ by no more than ``dense`` itself
   differs from the uncompressed model, which is rounding.
5. Apart from that, the scheme with the largest batch among those whose damage is within a limit that the user sets.

"KV Cache Quantization: FP8, INT8, INT4, ...", Decision Framework, takes FP8, then INT8, then INT4, whichever fits first, and never the
cache as it is; its order of the first two is not what was measured here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvcompile.tools.planner.capacity import Demand
from kvcompile.tools.planner.figures import Damage, Figures, Speed
from kvcompile.tools.planner.stores import Stores

EQUAL = 1e-6
"""KL in nats below which two schemes count as equal in float32, where rounding is less than can be told."""


class Generation(enum.Enum):
    """GPU generation, by its compute capability."""

    AMPERE = "sm_80"
    ADA = "sm_89"
    HOPPER = "sm_90"
    BLACKWELL = "sm_100"

    @property
    def converts_floats(self) -> bool:
        """Whether eight-bit floats are converted by an instruction (PTX cvt from sm_89 on)."""
        return self is not Generation.AMPERE


@dataclass(frozen=True)
class Option:
    """One scheme's stores with what they need and how far they go; ``e4m3``: whether codes are eight-bit floats."""

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
        """Search how far a scheme's stores go under a demand, and look up its figures."""
        held = [(item.scheme, item.slot.head_dim) for item in stores.stored if item.scheme is not None]
        kinds = [scheme.absmax(head_dim) or scheme.static(head_dim) for scheme, head_dim in held]
        return Option(
            label, stores, any(kind is not None and kind.e4m3 for kind in kinds), demand.largest_batch(stores),
            demand.longest_context(stores), demand.fits(stores, demand.batch, demand.context), known.damage(label, demand.context),
            known.timed(label, demand.batch, demand.context),
        )


@dataclass(frozen=True)
class Recommendation:
    """The scheme that is recommended, None where none fits; the one for most requests within the limit; and why, in sentences."""

    scheme: str | None
    most_requests: str | None
    reasons: tuple[str, ...]


def recommend(options: Sequence[Option], demand: Demand, generation: Generation, limit: float) -> Recommendation:
    """Apply the rules to all options; ``limit``: the KL in nats that serving more requests may cost."""
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
    """Say which schemes with less damage do not fit."""
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
