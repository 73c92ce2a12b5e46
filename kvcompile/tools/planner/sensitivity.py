"""Sensitivity: measures how far a model's predictions move when only one layer's keys or values are stored in a scheme.

Measured as in use: tokens are prefilled into an empty cache and the true ones decoded after them, through the compiled cache, in which all
other layers are dense. The damage is the KL divergence, in nats per token, from the uncompiled model without a cache to the compiled one.
"KV Cache Quantization: FP8, INT8, INT4, ...", K vs V Quantization Sensitivity, compares errors of one attention's output on random numbers,
which says little about predictions.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from kvcompile.backend import backend
from kvcompile.errors import FileUnfit, NotPlanned, SensitivityUnread, SiteRefused
from kvcompile.files.declared import Range
from kvcompile.files.json_file import read_json
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.schemes import Dense, Scheme, parse
from kvcompile.tools.planner.model import Model
from kvcompile.tools.planner.stores import DENSE
from kvcompile.types import Role, SlotSpec

FORMAT = 1


class CachePart(enum.Enum):
    """The part of a layer's cache that a scheme is tried on: keys, values, or both if one tensor holds both."""

    KEY = "key"
    VALUE = "value"
    BOTH = "both"

    def pair(self, scheme: Scheme) -> Pair:
        """Return the schemes of keys and values with this part stored in ``scheme`` and the other part dense."""
        return Pair(Dense() if self is CachePart.VALUE else scheme, Dense() if self is CachePart.KEY else scheme)


@dataclass(frozen=True)
class Layer:
    """One attention: its module path, its slots, the most tokens that it keeps (``end``, None: all), and its parts.

    ``parts``: the parts that may have schemes of their own.
    """

    path: str
    slots: tuple[SlotSpec, ...]
    end: int | None
    halves: tuple[CachePart, ...]


@dataclass(frozen=True)
class LayerDamage:
    """The KL, in nats per token, with one part of one layer (``half``: keys, values or both) in one scheme and all else dense."""

    path: str
    half: CachePart
    scheme: str
    kl: Annotated[float, Range()]


@dataclass(frozen=True)
class Sensitivity:
    """All damages of a model, and their measurement: texts (``rows``), tokens of a prompt, predictions per text (``steps``).

    ``floor``: the KL with every layer dense, which is rounding.
    """

    model: str
    layers: tuple[Layer, ...]
    damages: tuple[LayerDamage, ...]
    rows: int
    prompt: int
    steps: int
    floor: float

    def of(self, path: str, half: CachePart) -> dict[str, float]:
        """Return the KL by scheme of one part of one layer, at least zero."""
        return {item.scheme: max(0.0, item.kl) for item in self.damages if (item.path, item.half) == (path, half)}

    def save(self, path: Path) -> None:
        """Write the damages as JSON."""
        path.write_text(json.dumps(self.plain(), indent=1) + "\n")

    def plain(self) -> dict[str, Any]:
        """Return the damages as plain data, as ``save`` writes them."""
        layers = [
            {"path": item.path, "end": item.end, "halves": [half.value for half in item.halves], "slots": [
                {"heads": slot.heads, "head_dim": slot.head_dim, "dtype": str(slot.dtype).removeprefix("torch."), "role": slot.role.value}
                for slot in item.slots
            ]} for item in self.layers
        ]
        damages = [{"path": item.path, "half": item.half.value, "scheme": item.scheme, "kl": item.kl} for item in self.damages]
        return {
            "format": FORMAT, "model": self.model, "rows": self.rows, "prompt": self.prompt, "steps": self.steps, "floor": self.floor,
            "layers": layers, "damages": damages,
        }

    @staticmethod
    def load(path: Path) -> Sensitivity:
        """Return the damages of a file that ``save`` wrote. Raises SensitivityUnread if it is not one."""
        try:
            read = read_json(path, Saved)
        except FileUnfit as error:
            raise SensitivityUnread(path=path, found=error.fact) from error
        layers = tuple(Layer(item.path, tuple(slot.spec() for slot in item.slots), item.end, item.halves) for item in read.layers)
        return Sensitivity(read.model, layers, read.damages, read.rows, read.prompt, read.steps, read.floor)


Size = Annotated[int, Range(1)]


@dataclass(frozen=True)
class SavedSlot:
    """One slot of a layer in the JSON file that ``Sensitivity.save`` writes and ``Sensitivity.load`` reads."""

    heads: Size
    head_dim: Size
    dtype: torch.dtype
    role: Role

    def spec(self) -> SlotSpec:
        """Return the slot's facts in the form that schemes take."""
        return SlotSpec(self.heads, self.head_dim, self.dtype, self.role)


@dataclass(frozen=True)
class SavedLayer:
    """One layer in the JSON file of ``Sensitivity.save``: its module path, where its store ends, its parts and its slots."""

    path: str
    end: Size | None
    halves: tuple[CachePart, ...]
    slots: tuple[SavedSlot, ...]


@dataclass(frozen=True)
class Saved:
    """The contents of a file that ``Sensitivity.save`` wrote."""

    format: Annotated[int, Range(FORMAT, FORMAT)]
    model: str
    rows: Size
    prompt: Size
    steps: Size
    floor: Annotated[float, Range()]
    layers: tuple[SavedLayer, ...]
    damages: tuple[LayerDamage, ...]


def layers_of(model: Model) -> tuple[Layer, ...]:
    """Return the layers of a traced model. Raises NotPlanned if module paths do not identify its caches."""
    by_path: dict[str, list[Any]] = {}
    for item in model.stores(DENSE).stored:
        by_path.setdefault(item.path, []).append(item)
    sites = {site.path for seen in model.observed.graphs for site in seen.matched.sites}
    latent = {site.path for seen in model.observed.graphs for site in seen.matched.sites if site.assembly is not None}
    if "" in by_path or any(len(items) > 2 for items in by_path.values()):
        raise NotPlanned(expected="a module path of its own for every attention", found=f"{len(by_path)} paths", name=model.name)
    if sites != set(by_path):
        raise NotPlanned(expected="a cache of its own for every attention", found=f"one that {len(sites)} share", name=model.name)
    both, apart = (CachePart.BOTH,), (CachePart.KEY, CachePart.VALUE)
    return tuple(
        Layer(path, tuple(item.slot for item in items), items[0].end, both if path in latent else apart)
        for path, items in by_path.items()
    )


class Trial:
    """A model, tokens to decode, and the reference that policies are compared with.

    ``ids``: int64 [B, T]; the first ``prompt`` are prefilled, the others decoded one by one. ``cache``: returns an empty cache.
    """

    def __init__(self, model: Any, ids: torch.Tensor, prompt: int, cache: Callable[[], Any], inner: str = "eager") -> None:
        self.model, self.ids, self.prompt, self.cache, self.inner = model, ids, prompt, cache, inner
        with torch.no_grad():
            whole = model(input_ids=ids[:, :-1], use_cache=False).logits
        # In float64: rounding of float32 probabilities is as large as the damage of eight bits.
        self.reference = whole[:, prompt - 1 :].double().log_softmax(-1)

    def kl(self, policy: object, validate: bool = True) -> float:
        """Return the KL, in nats per token, from the uncompiled model to the model under a policy.

        Raises SiteRefused if a site is refused under it.

        ``validate``: validate each rewritten site; once is enough, since the result does not depend on the scheme.
        """
        torch.compiler.reset()
        compiled, cache = torch.compile(self.model, backend=backend(policy, inner=self.inner, strict=True, validate=validate)), self.cache()
        found = []
        with torch.no_grad():
            for start, stop in [(0, self.prompt), *((at, at + 1) for at in range(self.prompt, self.ids.shape[1] - 1))]:
                out = compiled(input_ids=self.ids[:, start:stop].contiguous(), past_key_values=cache, use_cache=True)
                found.append(out.logits[:, -1:].double().log_softmax(-1))
        logits = torch.cat(found, 1)
        total = torch.nn.functional.kl_div(logits, self.reference, log_target=True, reduction="sum")
        return float(total) / (logits.shape[0] * logits.shape[1])


def only(layer: str, pair: Pair) -> Policy:
    """Return the policy that stores one layer in a pair of schemes and all others dense."""
    return Policy((("*", Pair(Dense(), Dense())), (layer, pair)))


def measured(
    name: str, trial: Trial, layers: Sequence[Layer], schemes: Sequence[str], done: Callable[[str], None] = lambda what: None
) -> Sensitivity:
    """Return the damages of every scheme in every part of every layer; ``done`` is called after each. Refused schemes are left out.

    After the first damage is measured, Ctrl-C returns the damages measured so far.
    """
    floor = trial.kl(DENSE)
    damages: list[LayerDamage] = []
    try:
        # Not extend: a list that is interrupted keeps what was appended.
        for found in _measured(trial, layers, schemes, done):
            damages.append(found)  # noqa: PERF402
    except KeyboardInterrupt:
        if not damages:
            raise
    return Sensitivity(name, tuple(layers), tuple(damages), trial.ids.shape[0], trial.prompt, trial.reference.shape[1], floor)


def _measured(trial: Trial, layers: Sequence[Layer], schemes: Sequence[str], done: Callable[[str], None]) -> Iterator[LayerDamage]:
    for layer in layers:
        for half in layer.halves:
            for scheme in schemes:
                try:
                    yield LayerDamage(layer.path, half, scheme, trial.kl(only(layer.path, half.pair(parse(scheme))), validate=False))
                except Exception as error:
                    inner = getattr(error, "inner_exception", error)
                    if not isinstance(inner, SiteRefused):
                        raise
                done(f"{layer.path} {half.value} {scheme}")
