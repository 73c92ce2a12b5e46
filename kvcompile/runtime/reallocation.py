"""Reallocation: between two calls, the stores of adaptive schemes get new planes where their scheme says that it is time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.passes.plan.plan import SitePlan, layer_of
from kvcompile.passes.rewrite.context import part_of
from kvcompile.runtime.adaptive_store import AdaptiveStore
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.state import CacheState, Part
from kvcompile.runtime.store import ordinary


@dataclass(frozen=True)
class _Layer:
    """Keys and values of one attention: the cache tensor of each by its number in the graph, with its part, and the layer's number."""

    key: tuple[int, Part]
    value: tuple[int, Part]
    number: int


class Reallocation:
    """Decides the widths of a graph's adaptive stores anew after a call, where it is time; nothing in graphs without such stores."""

    def __init__(self, forms: Sequence[CacheForm], sites: Sequence[SitePlan]) -> None:
        place = {form.group.root: index for index, form in enumerate(forms)}
        found: dict[tuple[tuple[int, Part], tuple[int, Part]], _Layer] = {}
        for item in sites:
            if item.key.layout.first is not None:
                (key_root, key), (value_root, value) = part_of(item.key.slot), part_of(item.value.slot)
                layer = _Layer((place[key_root], key), (place[value_root], value), layer_of(item.site.path, item.site.index))
                # Attentions that share a cache decide once.
                found.setdefault((layer.key, layer.value), layer)
        self.layers = tuple(found.values())

    def after(self, states: Sequence[CacheState]) -> None:
        """Look at all layers once a call has been counted. Waits for the device only where widths are decided."""
        for layer in self.layers:
            (state, keys), (_, values) = (
                (states[index], states[index].stores[part]) for index, part in (layer.key, layer.value)
            )
            assert isinstance(keys, AdaptiveStore)
            assert isinstance(values, AdaptiveStore)
            scheme, slots, count = keys.scheme, (keys.spec.slot, values.spec.slot), state.length
            if not count:
                continue
            with ordinary(), torch.no_grad():
                now = (tuple(keys.planes), slots[0], keys.first, count, layer.number)
                if not scheme.due(*now) and not (scheme.looks(*now) and keys.drifted(count)):
                    continue
                made = scheme.reallocate(tuple(keys.planes), tuple(values.planes), slots, count, layer.number)
            keys.exchange(made.keys, made.churn)
            values.exchange(made.values)
