"""Sensitivity: how far a model's predictions move when one half of one layer's cache is stored in a scheme, and all else as it is.

Measured as in use: tokens are prefilled into an empty cache and the true ones decoded behind them, through the compiled cache. The
damage is the KL divergence, in nats a token, from the uncompiled model without a cache to the compiled one. "KV Cache Quantization: FP8,
INT8, INT4, ...", K vs V Quantization Sensitivity, compares the errors of one attention's output over random numbers; an output that
nothing reads says little about a model, so its predictions are compared here.
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


class Half(enum.Enum):
    """The part of a layer's cache that a scheme is tried on; both where keys and values are one tensor."""

    KEY = "key"
    VALUE = "value"
    BOTH = "both"

    def pair(self, scheme: Scheme) -> Pair:
        """Schemes of keys and values where this half is stored in ``scheme`` and the other as it is."""
        return Pair(Dense() if self is Half.VALUE else scheme, Dense() if self is Half.KEY else scheme)


@dataclass(frozen=True)
class Layer:
    """One attention: its module path, its slots, the tokens that it keeps at most, and which halves can be chosen."""

    path: str
    slots: tuple[SlotSpec, ...]
    end: int | None
    halves: tuple[Half, ...]


@dataclass(frozen=True)
class Damage:
    """The KL in nats a token of one scheme in one half of one layer."""

    path: str
    half: Half
    scheme: str
    kl: Annotated[float, Range()]


@dataclass(frozen=True)
class Sensitivity:
    """All damages of a model, with the tokens that they were measured over: rows, tokens of a prompt, predictions a row.

    ``floor``: the KL with every layer stored as it is, which rounding alone makes.
    """

    model: str
    layers: tuple[Layer, ...]
    damages: tuple[Damage, ...]
    rows: int
    prompt: int
    steps: int
    floor: float

    def of(self, path: str, half: Half) -> dict[str, float]:
        """KL by scheme of one half of one layer, never below zero."""
        return {item.scheme: max(0.0, item.kl) for item in self.damages if (item.path, item.half) == (path, half)}

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        layers = [
            {"path": item.path, "end": item.end, "halves": [half.value for half in item.halves], "slots": [
                {"heads": slot.heads, "head_dim": slot.head_dim, "dtype": str(slot.dtype).removeprefix("torch."), "role": slot.role.value}
                for slot in item.slots
            ]} for item in self.layers
        ]
        damages = [{"path": item.path, "half": item.half.value, "scheme": item.scheme, "kl": item.kl} for item in self.damages]
        made = {
            "format": FORMAT, "model": self.model, "rows": self.rows, "prompt": self.prompt, "steps": self.steps, "floor": self.floor,
            "layers": layers, "damages": damages,
        }
        path.write_text(json.dumps(made, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Sensitivity:
        """Read what ``save`` wrote; raises SensitivityUnread."""
        try:
            read = read_json(path, Saved)
        except FileUnfit as error:
            raise SensitivityUnread(path=path, found=error.fact) from error
        layers = tuple(Layer(item.path, tuple(slot.spec() for slot in item.slots), item.end, item.halves) for item in read.layers)
        return Sensitivity(read.model, layers, read.damages, read.rows, read.prompt, read.steps, read.floor)


Size = Annotated[int, Range(1)]


@dataclass(frozen=True)
class SavedSlot:
    """One slot as the file has it."""

    heads: Size
    head_dim: Size
    dtype: torch.dtype
    role: Role

    def spec(self) -> SlotSpec:
        """Return the facts that schemes take."""
        return SlotSpec(self.heads, self.head_dim, self.dtype, self.role)


@dataclass(frozen=True)
class SavedLayer:
    """One layer as the file has it."""

    path: str
    end: Size | None
    halves: tuple[Half, ...]
    slots: tuple[SavedSlot, ...]


@dataclass(frozen=True)
class Saved:
    """A whole file, as ``Sensitivity.save`` writes it."""

    format: Annotated[int, Range(FORMAT, FORMAT)]
    model: str
    rows: Size
    prompt: Size
    steps: Size
    floor: Annotated[float, Range()]
    layers: tuple[SavedLayer, ...]
    damages: tuple[Damage, ...]


def layers_of(model: Model) -> tuple[Layer, ...]:
    """The layers of a traced model; raises NotPlanned where a policy by module path could not tell its caches apart."""
    by_path: dict[str, list[Any]] = {}
    for item in model.stores(DENSE).stored:
        by_path.setdefault(item.path, []).append(item)
    sites = {site.path for seen in model.observed.graphs for site in seen.matched.sites}
    latent = {site.path for seen in model.observed.graphs for site in seen.matched.sites if site.assembly is not None}
    if "" in by_path or any(len(items) > 2 for items in by_path.values()):
        raise NotPlanned(expected="a module path of its own for every attention", found=f"{len(by_path)} paths", name=model.name)
    if sites != set(by_path):
        raise NotPlanned(expected="a cache of its own for every attention", found=f"one that {len(sites)} share", name=model.name)
    return tuple(
        Layer(path, tuple(item.slot for item in items), items[0].end, (Half.BOTH,) if path in latent else (Half.KEY, Half.VALUE))
        for path, items in by_path.items()
    )


class Trial:
    """A model, tokens to decode, and the reference that policies are held against.

    ``ids``: int64 [B, T]; the first ``prompt`` are prefilled, the others decoded one by one. ``cache``: makes an empty cache.
    """

    def __init__(self, model: Any, ids: torch.Tensor, prompt: int, cache: Callable[[], Any], inner: str = "eager") -> None:
        self.model, self.ids, self.prompt, self.cache, self.inner = model, ids, prompt, cache, inner
        with torch.no_grad():
            whole = model(input_ids=ids[:, :-1], use_cache=False).logits
        # In float64: rounding of float32 probabilities is as large as the damage of eight bits.
        self.reference = whole[:, prompt - 1 :].double().log_softmax(-1)

    def kl(self, policy: object, validate: bool = True) -> float:
        """KL in nats a token, from the model as it is to the model under a policy.

        ``validate``: try the rewrite of each site, which says the same whatever the scheme. Raises SiteRefused.
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
    """The policy that stores one layer by a pair, and all others as they are."""
    return Policy((("*", Pair(Dense(), Dense())), (layer, pair)))


def measured(
    name: str, trial: Trial, layers: Sequence[Layer], schemes: Sequence[str], done: Callable[[str], None] = lambda what: None
) -> Sensitivity:
    """Measure every scheme in every half of every layer; ``done`` is told of each. A half that refuses a scheme has no damage of it."""
    floor = trial.kl(DENSE)
    damages = tuple(_measured(trial, layers, schemes, done))
    return Sensitivity(name, tuple(layers), damages, trial.ids.shape[0], trial.prompt, trial.reference.shape[1], floor)


def _measured(trial: Trial, layers: Sequence[Layer], schemes: Sequence[str], done: Callable[[str], None]) -> Iterator[Damage]:
    for layer in layers:
        for half in layer.halves:
            for scheme in schemes:
                try:
                    yield Damage(layer.path, half, scheme, trial.kl(only(layer.path, half.pair(parse(scheme))), validate=False))
                except Exception as error:
                    inner = getattr(error, "inner_exception", error)
                    if not isinstance(inner, SiteRefused):
                        raise
                done(f"{layer.path} {half.value} {scheme}")
