"""Summaries of telemetry planes on the host: sums and quantiles over layers, rows, heads and steps, and the last certificates."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcompile.lowering.certificate.telemetry import added_up, own_rows
from kvcompile.schemes.certificate.policy import Cause, Count, Figure, Rung
from kvcompile.schemes.certificate.telemetry import (
    BINNED,
    BINS,
    COLUMNS,
    COUNTS,
    FIGURES,
    HISTOGRAMS_AT,
    LAST_AT,
    LAST_HEADS,
    LAST_WIDTH,
    edge,
    name_of,
)

QUANTILES = (0.5, 0.95)
"""Quantiles over head-steps that a report prints."""


@dataclass(frozen=True)
class Telemetry:
    """Telemetry of attention with a certificate, summed over some layers, rows, heads and steps.

    ``values``: the accumulators by name (``schemes.certificate.telemetry.COLUMNS``). ``histograms``: for each figure or counter by name,
    the number of head-steps in each bin of magnitude.
    """

    values: dict[str, float]
    histograms: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def of(planes: Iterable[torch.Tensor]) -> Telemetry:
        """Return the telemetry of all planes together; synchronises with their devices."""
        joined = [added_up([(plane, None)]).cpu() for plane in planes]
        return Telemetry.read(added_up([(plane, None) for plane in joined])[0, 0, 0, 0].tolist() if joined else [0.0] * LAST_AT)

    @staticmethod
    def read(numbers: Sequence[float]) -> Telemetry:
        """Return the telemetry that one kv head's columns of a plane (``numbers``) hold."""
        starts = ((name_of(each), HISTOGRAMS_AT + place * BINS) for place, each in enumerate(BINNED))
        return Telemetry(
            dict(zip(COLUMNS, numbers, strict=False)), {name: tuple(numbers[start : start + BINS]) for name, start in starts},
        )

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def since(self, before: Telemetry) -> Telemetry:
        """Return the telemetry added since ``before`` was read; ``most_`` values stay those of all steps."""
        values = {name: value if name.startswith("most_") else value - before[name] for name, value in self.values.items()}
        added = {name: tuple(map(operator.sub, counts, before.histograms[name])) for name, counts in self.histograms.items()}
        return Telemetry(values, added)

    def mean(self, figure: Figure) -> float:
        """Return the mean of a figure over head-steps."""
        return self[f"sum_{figure.name.lower()}"] / max(1.0, self["head_steps"])

    def quantile(self, name: str, share: float) -> float:
        """Return a quantile over head-steps of a bound or counter with a histogram: the upper end of its bin.

        Bins are a quarter of a factor of two wide, so the result is at most a quarter above the exact quantile; counters below 8 are exact.
        NaN without head-steps.
        """
        counts = self.histograms[name]
        if not sum(counts):
            return math.nan
        seen = itertools.accumulate(counts)
        index = next(at for at, (count, up_to) in enumerate(zip(counts, seen, strict=True)) if count and up_to >= share * sum(counts))
        if f"most_{name}" in self.values:
            return min(edge(index + 1) if index < BINS - 1 else math.inf, self[f"most_{name}"])
        return math.ceil(edge(index + 1)) - 1.0

    def plain(self) -> dict[str, float]:
        """Return, for JSON, the accumulators by name, and the quantiles ``p50_`` and ``p95_`` of each histogram that is not empty."""
        counted = [name for name, counts in self.histograms.items() if sum(counts)]
        return self.values | {f"p{100 * share:.0f}_{name}": self.quantile(name, share) for name in counted for share in QUANTILES}

    def __str__(self) -> str:
        steps, blocks = max(1.0, self["head_steps"]), max(1.0, self["blocks"])
        lines = [f"{self['head_steps']:,.0f} head-steps"]
        for figure in Figure:
            if figure not in {Figure.DELTA, Figure.TAIL}:
                name = figure.name.lower()
                found = f"mean {self.mean(figure):.3g}, {self._quantiles(name)}most {self['most_' + name]:.3g}"
                lines.append(f"  {name.replace('_', ' '):22}{found}")
        shares = (f"{name} {self[name] / blocks:.1%}" for name in ("keys", "values", "explored"))
        lines.append(f"  blocks read in full precision: {', '.join(shares)}")
        if self["keys"]:
            lines.append(f"  promoted keys a head-step: mean {self['keys'] / steps:.1f}, {self._quantiles('keys')[:-2]}")
        asked = {half: self[f"{half}_found"] + self[f"{half}_fetched"] for half in ("key", "value")}
        hits = (f"  full-precision {half}s found in the scratch: "
                f"{self[f'{half}_found'] / count:.1%}" for half, count in asked.items() if count)
        lines.extend(hits)
        if moved := self["key_bytes"] + self["value_bytes"]:
            lines.append(f"  over the bus: {moved / 1e6:,.2f} MB, {self['key_bytes'] / moved:.0%} of it keys")
        lines.append(f"  widened               {self['widened'] / steps:.2%}")
        lines += [f"  {rung.name.lower():22}{self['rung_' + rung.name.lower()] / steps:.2%}" for rung in Rung]
        causes = {cause.name.lower(): self[f"cause_{cause.name.lower()}"] for cause in Cause if cause.name}
        lines += [f"  for {name.replace('_', ' '):18}{count / steps:.2%}" for name, count in causes.items() if count]
        return "\n".join(lines)

    def _quantiles(self, name: str) -> str:
        if not sum(self.histograms.get(name, ())):
            return ""
        return "".join(f"p{100 * share:.0f} {self.quantile(name, share):.3g}, " for share in QUANTILES)


@dataclass(frozen=True)
class HeadTelemetry:
    """Telemetry of one kv head of one batch row of a live cache; ``path``: the module path of an attention that reads it."""

    path: str
    row: int
    head: int
    telemetry: Telemetry

    def place(self) -> tuple[list[str], int, int]:
        """Return a sort key: module path with layers by number, then row and head."""
        return ordered(self.path), self.row, self.head


@dataclass(frozen=True)
class HeadCertificate:
    """The certificate of one query head's newest query in the last step of a live cache.

    ``path``: the module path of the attention; ``row``: the batch row; ``head``: the query head. The returned output is within ``bound`` of
    attention over full-precision tokens, in the Euclidean norm; on the rungs HEAD and LAYER it is computed from them, so only
    ``arithmetic`` remains. Fields that begin with ``candidate_`` are the bounds of the result before the fallback. ``step``: number of
    steps in this cache's telemetry.
    """

    path: str
    row: int
    head: int
    step: int
    key: float
    value: float
    arithmetic: float
    candidate_key: float
    candidate_value: float
    candidate_arithmetic: float
    delta: float
    tail: float
    blocks: int
    keys: int
    values: int
    explored: int
    widened: bool
    rung: Rung
    causes: Cause

    @property
    def bound(self) -> float:
        """The sum of the three bounds: how far the returned output may be from attention over full-precision tokens."""
        return self.key + self.value + self.arithmetic

    def place(self) -> tuple[list[str], int, int]:
        """Return a sort key: module path with layers by number, then row and head."""
        return ordered(self.path), self.row, self.head


def ordered(path: str) -> list[str]:
    """Return a module path's parts as a sort key, with numbers ordered by size."""
    return [part.zfill(6) for part in path.split(".")]


def of_heads(path: str, plane: torch.Tensor, before: torch.Tensor | None) -> list[HeadTelemetry]:
    """Return the telemetry of every row and kv head of one plane, less the counts ``before`` (None: zero); synchronises with its device."""
    with torch.no_grad():
        rows = own_rows(plane, before)[..., :LAST_AT].cpu().tolist()
    return [
        HeadTelemetry(path, row, head, Telemetry.read(values)) for row, heads in enumerate(rows) for head, values in enumerate(heads)
    ]


def certificates_of(path: str, plane: torch.Tensor, before: torch.Tensor | None) -> list[HeadCertificate]:
    """Return the last step's certificates of every row and query head of one plane, LAST_HEADS a kv head at most; synchronises."""
    with torch.no_grad():
        steps, last = own_rows(plane, before)[..., 0].cpu().tolist(), plane[0, :, :, 0, LAST_AT:].cpu().tolist()
    found = []
    for row, heads in enumerate(last):
        for kv_head, (count, *numbers) in enumerate(heads):
            for index in range(min(int(count), LAST_HEADS)):
                values = numbers[index * LAST_WIDTH : (index + 1) * LAST_WIDTH]
                named: dict[str, Any] = {figure.name.lower(): value for figure, value in zip(FIGURES, values, strict=False)}
                whole = dict(zip(COUNTS, map(int, values[len(FIGURES) :]), strict=True))
                named |= {name: whole[Count[name.upper()]] for name in ("blocks", "keys", "values", "explored")}
                found.append(HeadCertificate(
                    path, row, kv_head * int(count) + index, int(steps[row][kv_head]), widened=bool(whole[Count.WIDENED]),
                    rung=Rung(whole[Count.RUNG]), causes=Cause(whole[Count.CAUSES]), **named,
                ))
    return found


def quantiles(heads: Sequence[HeadTelemetry], figure: Figure, shares: Sequence[float] = (0.5, 0.95, 1.0)) -> tuple[float, ...]:
    """Return the quantiles ``shares`` over heads of the figure's mean over a head's steps; heads without steps are left out.

    NaN if no head has steps.
    """
    means = [item.telemetry.mean(figure) for item in heads if item.telemetry["head_steps"]]
    if not means:
        return (float("nan"),) * len(shares)
    found, at = (torch.tensor(numbers, dtype=torch.float64, device="cpu") for numbers in (means, shares))
    return tuple(found.quantile(at).tolist())
