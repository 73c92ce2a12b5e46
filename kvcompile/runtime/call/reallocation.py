"""Reallocation: between calls, give stores of adaptive schemes new widths and planes when their scheme demands it.

A decision is started after one step and applied from the second step after it, a few layers a step (``Due.SOON``). On CUDA it is computed
on a separate stream, from copies of data that steps write, while those steps run; a layer is re-encoded between two steps on their own
stream, so no step sees it half done. Device data that the host reads has been copied by then. If more tokens come at once, as in a
prompt, everything is done at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcompile.passes.plan.plan import SitePlan, layer_of
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.store.adaptive_store import AdaptiveStore, Pending
from kvcompile.runtime.store.state import CacheState, Part
from kvcompile.runtime.store.store import ordinary
from kvcompile.schemes import Due, PendingNumbers, StoredLayer
from kvcompile.schemes.adaptive import EARLY, SPREAD

LAYERS_A_STEP = 4
"""Smallest number of layers that are re-encoded after one step, if so many are due."""


@dataclass(frozen=True)
class _Layer:
    """Keys and values of one attention: (index of the cache tensor in the graph, part) of each, and the layer's number."""

    key: tuple[int, Part]
    value: tuple[int, Part]
    number: int


@dataclass(frozen=True)
class _Held:
    """The stores of a layer's keys and values, the layer's number, and the number of tokens in them."""

    keys: AdaptiveStore
    values: AdaptiveStore
    layer: int
    count: int

    @property
    def quiet(self) -> bool:
        """Whether nothing is to be done after this step: no tokens; or no pending decision, and no decision or drift check due."""
        return self.count == 0 or (self.keys.decision is None and self.keys.quiet(self.count))

    @property
    def decided(self) -> int:
        """Number of tokens when the pending decision was started."""
        assert self.keys.decision is not None
        return int(self.keys.decision.asked[1])

    @property
    def alike(self) -> Hashable:
        """A key that is equal for layers that can be decided in one batch."""
        return self.keys.scheme, self.keys.spec.slot, self.values.spec.slot, self.count, self.keys.batch, self.keys.device

    @property
    def stored(self) -> StoredLayer:
        """The current planes of keys and values."""
        slots = (self.keys.spec.slot, self.values.spec.slot)
        return StoredLayer(tuple(self.keys.planes), tuple(self.values.planes), slots, self.layer, self.keys.first)

    def move(self) -> None:
        """Re-encode the layer's keys and values, in place, as the pending decision says."""
        asked = self.keys.decision
        assert asked is not None
        decision, count = asked.asked
        for store in (self.keys, self.values):
            store.keep(count)
        made = self.keys.scheme.move(self.stored, decision, asked.number, self.count)
        self.keys.exchange(made.keys, count, made.churn)
        self.values.exchange(made.values, count)


class Reallocation:
    """Decides widths of a graph's adaptive stores again after calls; does nothing in graphs without such stores."""

    def __init__(self, forms: Sequence[CacheForm], sites: Sequence[SitePlan]) -> None:
        place = {form.group.root: index for index, form in enumerate(forms)}
        found: dict[tuple[tuple[int, Part], tuple[int, Part]], _Layer] = {}
        for item in sites:
            if item.key.layout.first is not None:
                (key_root, key), (value_root, value) = item.key.slot.part, item.value.slot.part
                layer = _Layer((place[key_root], key), (place[value_root], value), layer_of(item.site.path, item.site.index))
                # Attentions that share a cache decide once.
                found.setdefault((layer.key, layer.value), layer)
        self.layers = tuple(found.values())
        self.at_once = max(LAYERS_A_STEP, -(-len(self.layers) // SPREAD))
        self.early = EARLY + -(-len(self.layers) // self.at_once) - 1

    def after(self, states: Sequence[CacheState]) -> None:
        """Start and apply due decisions and drift checks of all layers, after a call was recorded."""
        held = [self._held(layer, states) for layer in self.layers]
        busy = [item for item in held if not item.quiet]
        if not busy:
            return
        with ordinary(), torch.no_grad():
            waiting = [item for item in busy if item.keys.decision is not None]
            # More tokens than a decision can wait for: it is applied, and the layer is checked again.
            overdue = [item for item in waiting if self._due(item) is Due.NOW]
            ready = [item for item in waiting if item.decided <= item.count - EARLY][: self.at_once]
            _move(overdue or ready)
            due = {Due.NOW: list[_Held](), Due.SOON: list[_Held](), Due.NOT: list[_Held]()}
            for item in busy:
                if item.keys.decision is None:
                    due[self._due(item)].append(item)
            for kind in (Due.NOW, Due.SOON):
                for layers in _alike(due[kind]):
                    _decide(layers, held, beside=kind is Due.SOON)
            _move(due[Due.NOW])
            for layers in _alike(item for item in due[Due.NOT] if item.keys.looks(item.count, item.layer)):
                _look(layers, held)

    def _due(self, item: _Held) -> Due:
        """Return when a layer's widths must be decided; reads and drops the last drift check if the next one is due."""
        due = item.keys.due(item.count, item.layer, self.early)
        if due is not Due.NOT or item.keys.decision is not None or not item.keys.looks(item.count, item.layer):
            return due
        seen, item.keys.look = item.keys.look, None
        return Due.SOON if seen is not None and seen.asked.numbers[seen.number] else Due.NOT

    @staticmethod
    def _held(layer: _Layer, states: Sequence[CacheState]) -> _Held:
        (index, key), (other, value) = layer.key, layer.value
        keys, values = states[index].stores[key], states[other].stores[value]
        assert isinstance(keys, AdaptiveStore)
        assert isinstance(values, AdaptiveStore)
        return _Held(keys, values, layer.number, states[index].length)


def _alike(layers: Iterable[_Held]) -> Iterable[list[_Held]]:
    """Return the layers grouped by ``alike``."""
    groups: dict[Hashable, list[_Held]] = {}
    for item in layers:
        groups.setdefault(item.alike, []).append(item)
    return groups.values()


def _importance(layers: Sequence[_Held], held: Sequence[_Held]) -> torch.Tensor:
    """Return the importance of the stored tokens of ``layers``, in a new tensor, as ``importance`` of their scheme computes it.

    The ``layers`` are alike. ``held``: all layers of the graph; the planes of those that are alike are passed to the scheme, which may
    average over them.
    """
    among = [tuple(item.keys.planes) for item in held if item.alike == layers[0].alike]
    return layers[0].keys.scheme.importance([tuple(item.keys.planes) for item in layers], layers[0].count, among)


def _decide(layers: Sequence[_Held], held: Sequence[_Held], beside: bool) -> None:
    """Start a decision for layers that are alike; ``beside``: concurrently with the next step, else now."""
    importance = _importance(layers, held)
    stored = [item.stored for item in layers]
    with _beside([importance, *(plane for item in stored for plane in (*item.keys, *item.values))], beside):
        decision = layers[0].keys.scheme.decide(stored, importance)
    for number, item in enumerate(layers):
        item.keys.decision = Pending((decision, item.count), number)


def _look(layers: Sequence[_Held], held: Sequence[_Held]) -> None:
    """Start a drift check of the importance of ``layers``, which are alike; it runs concurrently with the next step."""
    importance = _importance(layers, held)
    with _beside([importance], beside=True):
        look = PendingNumbers(layers[0].keys.scheme.drifted(importance))
    for number, item in enumerate(layers):
        item.keys.look = Pending(look, number)


def _move(layers: Sequence[_Held]) -> None:
    """Apply the decisions of some layers, after the separate streams have finished: an abandoned decision may still read the planes."""
    for device in {item.keys.device for item in layers}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(_own_stream(device))
    for item in layers:
        item.move()


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which decisions are computed."""
    made: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return made(device)


@contextlib.contextmanager
def _beside(read: Sequence[torch.Tensor], beside: bool) -> Iterator[None]:
    """Run the body of the context on a separate stream, after all work queued so far.

    If not ``beside``, or without CUDA, it runs on the current stream. ``read``: the tensors that the body reads. Their memory is not reused
    before it has read them, even if its result is dropped with them.
    """
    device = read[0].device
    if device.type != "cuda" or not beside:
        yield
        return
    stream = _own_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for tensor in read:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield
