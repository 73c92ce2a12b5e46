"""Reallocation: between two calls, the stores of adaptive schemes get new planes where their scheme says that it is time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kvcompile.passes.plan.plan import SitePlan, layer_of
from kvcompile.passes.rewrite.context import part_of
from kvcompile.runtime.adaptive_store import AdaptiveStore
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.state import CacheState, Part
from kvcompile.runtime.store import ordinary
from kvcompile.schemes import Stored


@dataclass(frozen=True)
class _Layer:
    """Keys and values of one attention: the cache tensor of each by its number in the graph, with its part, and the layer's number."""

    key: tuple[int, Part]
    value: tuple[int, Part]
    number: int


@dataclass(frozen=True)
class _Held:
    """Stores of keys and values of a layer, the layer's number, and how many tokens they hold."""

    keys: AdaptiveStore
    values: AdaptiveStore
    layer: int
    count: int

    @property
    def due(self) -> bool:
        """Whether the widths are to be decided anew; to be asked once a step."""
        return self.count > 0 and self.keys.due(self.count, self.layer)

    @property
    def alike(self) -> Hashable:
        """A key that layers share which can be decided side by side."""
        return self.keys.scheme, self.keys.spec.slot, self.values.spec.slot, self.count, self.keys.batch, self.keys.device

    @property
    def stored(self) -> Stored:
        """The planes that they hold now."""
        slots = (self.keys.spec.slot, self.values.spec.slot)
        return Stored(tuple(self.keys.planes), tuple(self.values.planes), slots, self.layer, self.keys.first)


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
        held = [self._held(layer, states) for layer in self.layers]
        due = [item for item in held if item.due]
        if not due:
            return
        groups: dict[Hashable, list[_Held]] = {}
        for item in due:
            groups.setdefault(item.alike, []).append(item)
        with ordinary(), torch.no_grad():
            # Before any layer's planes are exchanged.
            given = [
                layers[0].keys.scheme.across([tuple(item.keys.planes) for item in held if item.alike == alike], layers[0].count)
                for alike, layers in groups.items()
            ]
            for layers, importance in zip(groups.values(), given, strict=True):
                scheme, count = layers[0].keys.scheme, layers[0].count
                # The scheme alone has the old planes, so that each layer's are gone before the next one is moved.
                for item, made in zip(layers, scheme.reallocate([item.stored for item in layers], count, importance), strict=True):
                    item.keys.exchange(made.keys, count, made.churn)
                    item.values.exchange(made.values, count)

    @staticmethod
    def _held(layer: _Layer, states: Sequence[CacheState]) -> _Held:
        (index, key), (other, value) = layer.key, layer.value
        keys, values = states[index].stores[key], states[other].stores[value]
        assert isinstance(keys, AdaptiveStore)
        assert isinstance(values, AdaptiveStore)
        return _Held(keys, values, layer.number, states[index].length)
