"""Telemetry of attention with a certificate: what a step says of itself, accumulated in a plane that the host reads on request.

A plane [1, B, K, 1, 34] of float64: steps, head-steps, the sum and the largest of every ``Figure``, and how often every
``Count``, ``Rung`` and ``Cause`` was; what became of the scratch. The step number is also the clock that exploration draws by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcompile.lowering.certificate.bound_printer import up32
from kvcompile.lowering.certificate.head_bounds import Certificate
from kvcompile.schemes.certificate.policy import Cause, Count, Figure, Rung
from kvcompile.schemes.certificate.telemetry import TELEMETRY

COUNTED = (Count.BLOCKS, Count.KEYS, Count.VALUES, Count.EXPLORED)

COLUMNS: tuple[str, ...] = (
    "steps", "head_steps", *(f"sum_{figure.name.lower()}" for figure in Figure), *(f"most_{figure.name.lower()}" for figure in Figure),
    *(f"{count.name.lower()}" for count in COUNTED), *(f"rung_{rung.name.lower()}" for rung in Rung),
    *(f"cause_{cause.name.lower()}" for cause in Cause if cause.name), "scratch", "fetched",
)
"""The accumulators, in order; ``sum_`` and the counters add up, ``most_`` is the largest. The last two count blocks of original keys of a
kv head, where they are in host memory and some of them on the device: those asked for that were there, and those read over the bus."""

# The columns' order: Dynamo of torch 2.11 cannot iterate over an enum.
FIGURES, COUNTS = tuple(Figure), tuple(Count)
MOST = tuple(name.startswith("most_") for name in COLUMNS)


def side_by_side(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack(columns, -1)`` as one choice by column, of which Inductor makes one kernel: of a stack it makes one a column."""
    found, place = columns[-1].unsqueeze(-1), torch.arange(len(columns), device=columns[0].device)
    for index, column in enumerate(columns[:-1]):
        found = torch.where(place == index, column.unsqueeze(-1), found)
    return found


def in_a_row(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """``torch.cat(parts, -1)`` filled up with zeros to ``width``, as one sum, for the same reason; infinity stays."""
    found, first = torch.zeros((), dtype=parts[0].dtype, device=parts[0].device), 0
    for part in parts:
        found = found + torch.nn.functional.pad(part, (first, width - first - part.shape[-1]))
        first += part.shape[-1]
    return found


def figures_of(
    candidate: Certificate, falls: torch.Tensor, dense: torch.Tensor, delta: torch.Tensor, tail: torch.Tensor
) -> torch.Tensor:
    """The columns of ``Figure``, of the candidates and of what is returned: a head that ``falls`` back has the arithmetic of ``dense``."""
    key, value, arithmetic = (up32(x) for x in candidate)
    columns = {
        Figure.CANDIDATE_KEY: key, Figure.CANDIDATE_VALUE: value, Figure.CANDIDATE_ARITHMETIC: arithmetic,
        Figure.KEY: torch.where(falls, 0, key), Figure.VALUE: torch.where(falls, 0, value),
        Figure.ARITHMETIC: torch.where(falls, up32(dense), arithmetic), Figure.DELTA: up32(delta), Figure.TAIL: up32(tail),
    }
    return side_by_side([columns[figure] for figure in FIGURES])


class Counted(NamedTuple):
    """Blocks of codes that a row sees, and how many of them were promoted, keys and values, and explored; [B, K, Q]."""

    blocks: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    explored: torch.Tensor


def counts_of(counted: Counted, widened: torch.Tensor, falls: torch.Tensor, causes: torch.Tensor) -> torch.Tensor:
    """The columns of ``Count``."""
    rung = torch.where(widened, int(Rung.WIDENED), int(Rung.PLAIN))
    rung = torch.where(counted.values > 0, int(Rung.VALUES), rung)
    rung = torch.where(falls, int(Rung.HEAD), rung)
    rung = torch.where(falls & ((causes & int(Cause.DAMAGED)) != 0), int(Rung.LAYER), rung)
    columns = {
        Count.BLOCKS: counted.blocks, Count.KEYS: counted.keys, Count.VALUES: counted.values, Count.EXPLORED: counted.explored,
        Count.RUNG: rung, Count.CAUSES: causes,
    }
    return side_by_side([columns[count].to(torch.int32) for count in COUNTS])


def accumulate(telemetry: torch.Tensor, figures: torch.Tensor, counts: torch.Tensor) -> None:
    """Add one step's figures and counters [B, H, S, ...] to the plane, in place. A figure that is no number counts as infinite."""
    K = telemetry.shape[2]
    by_head = figures.to(torch.float64).nan_to_num(torch.inf, torch.inf).unflatten(1, (K, -1)).flatten(2, 3)
    counted = counts.unflatten(1, (K, -1)).flatten(2, 3)
    rung, causes = counted[..., Count.RUNG], counted[..., Count.CAUSES]
    # All columns of a kind at once: a column at a time each would be a kernel of its own.
    rungs = rung.unsqueeze(-1) == torch.arange(len(Rung), device=rung.device)
    bits = (causes.unsqueeze(-1) >> torch.arange(len(Cause), device=causes.device)) & 1
    kinds = [counted[..., : len(COUNTED)], rungs.to(counted.dtype), bits.to(counted.dtype)]
    counters = in_a_row(kinds, sum(kind.shape[-1] for kind in kinds)).sum(2).to(torch.float64)
    steps = by_head.new_ones(*by_head.shape[:2], 1)
    new = in_a_row([steps, steps * rung.shape[-1], by_head.sum(2), by_head.amax(2), counters], TELEMETRY)
    held = telemetry[0, :, :, 0]
    # Not a tensor made from a list: that is a copy from the host, which no CUDA graph can hold.
    column = torch.arange(TELEMETRY, device=held.device)
    most = (column >= MOST.index(True)) & (column < MOST.index(True) + sum(MOST))
    held.copy_(torch.where(most, torch.maximum(held, new), held + new))


def own_rows(plane: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """A plane [B, K, 34] less what it held ``before`` it was its own; what is largest stays."""
    if before is None:
        return plane[0, :, :, 0]
    column = torch.arange(TELEMETRY, device=plane.device)
    most = (column >= MOST.index(True)) & (column < MOST.index(True) + sum(MOST))
    return torch.where(most, plane, plane - before)[0, :, :, 0]


def added_up(told: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
    """One plane [1, 1, 1, 1, 34] of several on one device, each less what it held ``before`` it was its own; waits for nothing."""
    with torch.no_grad():
        column = torch.arange(TELEMETRY, device=told[0][0].device)
        most = (column >= MOST.index(True)) & (column < MOST.index(True) + sum(MOST))
        joined = torch.cat([own_rows(plane, before).flatten(0, 1) for plane, before in told])
        return torch.where(most, joined.amax(0), joined.sum(0))[None, None, None, None]


@dataclass(frozen=True)
class Telemetry:
    """Telemetry of attention with a certificate, over some layers, rows and heads."""

    values: dict[str, float]

    @staticmethod
    def of(planes: Iterable[torch.Tensor]) -> Telemetry:
        """From telemetry planes; waits for their devices."""
        read = [plane[0, :, :, 0, : len(COLUMNS)].flatten(0, 1).cpu() for plane in planes]
        rows = torch.cat([*read, torch.zeros(1, len(COLUMNS), dtype=torch.float64)])
        joined = torch.where(torch.tensor(MOST), rows.amax(0), rows.sum(0))
        return Telemetry(dict(zip(COLUMNS, joined.tolist(), strict=True)))

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def mean(self, figure: Figure) -> float:
        """The mean of a figure over head-steps."""
        return self[f"sum_{figure.name.lower()}"] / max(1.0, self["head_steps"])

    def __str__(self) -> str:
        steps = max(1.0, self["head_steps"])
        lines = [f"{self['head_steps']:,.0f} head-steps"]
        for figure in Figure:
            if figure not in {Figure.DELTA, Figure.TAIL}:
                name = figure.name.lower()
                lines.append(f"  {name.replace('_', ' '):22}mean {self.mean(figure):.3g}, most {self['most_' + name]:.3g}")
        blocks = max(1.0, self["blocks"])
        shares = (f"{name} {self[name] / blocks:.1%}" for name in ("keys", "values", "explored"))
        lines.append(f"  blocks from originals: {', '.join(shares)}")
        if found := self["scratch"] + self["fetched"]:
            lines.append(f"  original keys found in the scratch: {self['scratch'] / found:.1%}")
        lines += [f"  {rung.name.lower():22}{self['rung_' + rung.name.lower()] / steps:.2%}" for rung in Rung]
        causes = {cause.name.lower(): self[f"cause_{cause.name.lower()}"] for cause in Cause if cause.name}
        lines += [f"  for {name.replace('_', ' '):18}{count / steps:.2%}" for name, count in causes.items() if count]
        return "\n".join(lines)


@dataclass(frozen=True)
class HeadTelemetry:
    """Telemetry of one kv head of one batch row of a live cache; ``path``: the module path of an attention that reads it."""

    path: str
    row: int
    head: int
    telemetry: Telemetry

    def place(self) -> tuple[list[str], int, int]:
        """Order by module path, layers by number, then by row and head."""
        return [part.zfill(6) for part in self.path.split(".")], self.row, self.head


def of_heads(path: str, plane: torch.Tensor, before: torch.Tensor | None) -> list[HeadTelemetry]:
    """The telemetry of every row and kv head of one plane; waits for its device."""
    with torch.no_grad():
        rows = own_rows(plane, before)[..., : len(COLUMNS)].cpu().tolist()
    return [
        HeadTelemetry(path, row, head, Telemetry(dict(zip(COLUMNS, values, strict=True))))
        for row, heads in enumerate(rows) for head, values in enumerate(heads)
    ]


def quantiles(heads: Sequence[HeadTelemetry], figure: Figure, shares: Sequence[float] = (0.5, 0.95, 1.0)) -> tuple[float, ...]:
    """The figure's mean over the steps of each head that stepped, and of these means the quantiles; NaN where no head did."""
    means = [item.telemetry.mean(figure) for item in heads if item.telemetry["head_steps"]]
    if not means:
        return (float("nan"),) * len(shares)
    return tuple(torch.tensor(means, dtype=torch.float64).quantile(torch.tensor(shares, dtype=torch.float64)).tolist())
