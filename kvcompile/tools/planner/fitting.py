"""Fitting: chooses a scheme for each layer's keys and values within a budget of bytes, with the least sum of measured damages.

``backend(scheme=kvcompile.fit(memory=2e9, sensitivity="sensitivity.json", context=32768))``. Every layer gets one measured scheme for its
keys and one for its values, or keeps them dense. This is a multiple-choice knapsack, solved exactly by its Pareto front: layer by layer,
choices that another one beats in both bytes and KL are dropped. That damages add up is an assumption, since each was measured alone;
``kvcompile sensitivity --memory`` measures the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcompile.errors import BudgetTooSmall, SchemeError
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.schemes import Dense, Scheme, parse
from kvcompile.tools.planner.sensitivity import CachePart, Layer, Sensitivity
from kvcompile.tools.planner.stores import StoredSlot
from kvcompile.types import Role, SlotSpec

T = TypeVar("T")

MOST_CHOICES = 20_000
"""Points of the front that are kept; beyond that, some between others of nearly equal bytes are dropped, so the optimum may be missed."""


@dataclass(frozen=True)
class PairOption:
    """Schemes of one layer's keys and values, their bytes and the sum of their damages."""

    pair: Pair
    nbytes: int
    damage: float


@dataclass(frozen=True)
class Fitted:
    """A policy with a choice for every layer, and its sums of bytes and damages."""

    policy: Policy
    nbytes: int
    damage: float


def fit(memory: float, sensitivity: str | Path | Sensitivity, context: int, batch: int = 1) -> Policy:
    """Return the per-layer policy of least measured damage whose caches of ``batch`` x ``context`` tokens take at most ``memory`` bytes.

    With very many layers and schemes a policy of slightly more damage may be returned (MOST_CHOICES). ``sensitivity``: a file that
    ``kvcompile sensitivity`` wrote for this model. Raises BudgetTooSmall or SensitivityUnread.
    """
    known = sensitivity if isinstance(sensitivity, Sensitivity) else Sensitivity.load(Path(sensitivity))
    return fitted(known, int(memory), context, batch).policy


def fitted(known: Sensitivity, memory: int, context: int, batch: int = 1) -> Fitted:
    """Return the policy of least measured damage that takes at most ``memory`` bytes, with the damage and bytes of all its layers.

    The least may be missed where more than MOST_CHOICES choices are kept. Bytes are those of static caches of ``batch`` rows of ``context``
    tokens. Raises BudgetTooSmall if no policy fits.
    """
    fronts = [_unbeaten(_choices(known, layer, context, batch), lambda item: (item.nbytes, item.damage)) for layer in known.layers]
    least = [min(item.nbytes for item in front) for front in fronts]
    if sum(least) > memory:
        raise BudgetTooSmall(least=sum(least), batch=batch, context=context, memory=memory)
    states: list[tuple[int, float, tuple[Pair, ...]]] = [(0, 0.0, ())]
    for index, front in enumerate(fronts):
        room = memory - sum(least[index + 1 :])
        states = _thinned(_unbeaten((
            (nbytes + item.nbytes, damage + item.damage, (*pairs, item.pair))
            for nbytes, damage, pairs in states for item in front if nbytes + item.nbytes <= room
        ), lambda state: state[:2]))
    nbytes, damage, pairs = states[-1]
    rules = tuple((layer.path, pair) for layer, pair in zip(known.layers, pairs, strict=True))
    return Fitted(Policy(rules), nbytes, damage)


def _choices(known: Sensitivity, layer: Layer, context: int, batch: int) -> list[PairOption]:
    """Return the pairs of schemes that one layer can have: measured ones, and dense with a damage of 0; with their bytes and damages."""
    options = {half: [(parse(name), kl) for name, kl in known.of(layer.path, half).items()] for half in layer.halves}
    for found in options.values():
        found.append((Dense(), 0.0))
    if layer.halves == (CachePart.BOTH,):
        pairs = [(Pair(scheme, scheme), kl) for scheme, kl in options[CachePart.BOTH]]
    else:
        pairs = [(Pair(k, v), of_k + of_v) for (k, of_k), (v, of_v) in itertools.product(options[CachePart.KEY], options[CachePart.VALUE])]
    made = []
    for pair, damage in pairs:
        try:
            made.append(PairOption(pair, _nbytes(layer, pair, context, batch), damage))
        except SchemeError:
            # Not every pair of schemes can serve one attention.
            continue
    return made


def _nbytes(layer: Layer, pair: Pair, context: int, batch: int) -> int:
    """Return the bytes of one layer's stores for ``batch`` rows of ``context`` tokens under a pair of schemes.

    Raises a SchemeError if the layer cannot have that pair.
    """
    window = max(pair.k.window, pair.v.window)
    for scheme in (pair.k, pair.v):
        scheme.check_pair(pair.k, pair.v, layer.halves == (CachePart.BOTH,), layer.path)
    return sum(_stored(layer, slot, pair.k if _is_key(layer, slot) else pair.v, window).nbytes(batch, context) for slot in layer.slots)


def _is_key(layer: Layer, slot: SlotSpec) -> bool:
    """Return whether a layer's key scheme stores this slot: true for keys, and for a latent, whose slot has the role of values."""
    return layer.halves == (CachePart.BOTH,) or slot.role is Role.KEY


def _stored(layer: Layer, slot: SlotSpec, scheme: Scheme, window: int) -> StoredSlot:
    own = scheme.for_role(slot.role)
    own.check(slot)
    layout = own.layout(slot)
    return StoredSlot(layer.path, slot, own, layout.windowed(slot, window) if window else layout, layer.end, exact=layer.end is None)


def _unbeaten(items: Iterable[T], cost: Callable[[T], tuple[int, float]]) -> list[T]:
    """Return the items that no other beats in both bytes and damage (``cost``), by rising bytes, so the last has the least damage."""
    kept: list[T] = []
    for item in sorted(items, key=cost):
        if not kept or cost(item)[1] < cost(kept[-1])[1]:
            kept.append(item)
    return kept


def _thinned(states: list[tuple[int, float, tuple[Pair, ...]]]) -> list[tuple[int, float, tuple[Pair, ...]]]:
    """Return at most about ``MOST_CHOICES`` of the states (bytes, damage, pairs), including the first and the last."""
    if len(states) <= MOST_CHOICES:
        return states
    step = -(-len(states) // MOST_CHOICES)
    return [*states[:-1:step], states[-1]]
