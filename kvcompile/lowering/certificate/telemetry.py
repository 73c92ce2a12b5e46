"""Telemetry of attention with a certificate: each step's figures and counters are added to a plane that the host reads on request.

``schemes.certificate.telemetry`` describes the plane's columns. Its step number also seeds exploration's random draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcompile.lowering.certificate.bound_printer import up32
from kvcompile.lowering.certificate.head_bounds import Certificate
from kvcompile.schemes.certificate.policy import Cause, Count, Figure, Rung
from kvcompile.schemes.certificate.telemetry import (
    BINNED,
    BINS,
    COLUMNS,
    COUNTED,
    COUNTS,
    FIGURES,
    FIRST_BITS,
    HISTOGRAMS_AT,
    KINDS,
    LAST_AT,
    LAST_HEADS,
    LAST_WIDTH,
    TELEMETRY,
    JoinRule,
)

WIDEST = KINDS.index(JoinRule.MOST), KINDS.index(JoinRule.MOST) + KINDS.count(JoinRule.MOST)
"""Range of columns, first and end, that keep the maximum."""


def side_by_side(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``torch.stack(columns, -1)`` of tensors of one shape, computed by selects.

    Inductor compiles selects to one kernel, and a stack to one kernel per column.
    """
    found, place = columns[-1].unsqueeze(-1), torch.arange(len(columns), device=columns[0].device)
    for index, column in enumerate(columns[:-1]):
        found = torch.where(place == index, column.unsqueeze(-1), found)
    return found


def in_a_row(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return ``torch.cat(parts, -1)`` padded with zeros to ``width``, computed by one sum; infinities stay.

    Inductor compiles the sum to one kernel.
    """
    found, first = torch.zeros((), dtype=parts[0].dtype, device=parts[0].device), 0
    for part in parts:
        found = found + torch.nn.functional.pad(part, (first, width - first - part.shape[-1]))
        first += part.shape[-1]
    return found


def figures_of(
    candidate: Certificate, falls: torch.Tensor, dense: torch.Tensor, delta: torch.Tensor, tail: torch.Tensor
) -> torch.Tensor:
    """Return the columns of ``FIGURES`` for each head, float32 [..., figures]: bounds of the result from codes and of the returned result.

    ``candidate``: the bounds of the result from codes. ``falls``: heads that fall back, whose returned result has only the arithmetic bound
    ``dense``. ``delta``, ``tail``: figures that are only recorded.
    """
    key, value, arithmetic = (up32(x) for x in candidate)
    columns = {
        Figure.CANDIDATE_KEY: key, Figure.CANDIDATE_VALUE: value, Figure.CANDIDATE_ARITHMETIC: arithmetic,
        Figure.KEY: torch.where(falls, 0, key), Figure.VALUE: torch.where(falls, 0, value),
        Figure.ARITHMETIC: torch.where(falls, up32(dense), arithmetic), Figure.DELTA: up32(delta), Figure.TAIL: up32(tail),
    }
    return side_by_side([columns[figure] for figure in FIGURES])


class Counted(NamedTuple):
    """Numbers of blocks per query, [B, K, Q]: visible encoded blocks; and of these, with promoted keys, with promoted values, explored."""

    blocks: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    explored: torch.Tensor


def counts_of(counted: Counted, widened: torch.Tensor, falls: torch.Tensor, causes: torch.Tensor) -> torch.Tensor:
    """Return the columns of ``Count`` for each head, int32 [..., counts].

    ``widened``: heads for which rung 1 added blocks; ``falls``: heads that fall back; ``causes``: their ``Cause`` bits.
    """
    rung = torch.where(widened, int(Rung.WIDENED), int(Rung.PLAIN))
    rung = torch.where(counted.values > 0, int(Rung.VALUES), rung)
    rung = torch.where(falls, int(Rung.HEAD), rung)
    rung = torch.where(falls & ((causes & int(Cause.DAMAGED)) != 0), int(Rung.LAYER), rung)
    columns = {
        Count.BLOCKS: counted.blocks, Count.KEYS: counted.keys, Count.VALUES: counted.values, Count.EXPLORED: counted.explored,
        Count.WIDENED: widened, Count.RUNG: rung, Count.CAUSES: causes,
    }
    return side_by_side([columns[count].to(torch.int32) for count in COUNTS])


def accumulate(telemetry: torch.Tensor, figures: torch.Tensor, counts: torch.Tensor) -> None:
    """Add one step's figures and counters [B, H, S, ...] to the plane, in place; a NaN figure counts as infinite.

    Kernels count scratch hits and bytes over the bus themselves.
    """
    held, K = telemetry[0, :, :, 0], telemetry.shape[2]
    by_head, counted = figures.nan_to_num(torch.inf, torch.inf).unflatten(1, (K, -1)), counts.unflatten(1, (K, -1))
    new = _sums(by_head.flatten(2, 3), counted.flatten(2, 3))
    # No tensor from a list: that is a copy from the host, which a CUDA graph cannot contain.
    column = torch.arange(len(COLUMNS), device=held.device)
    most, sums = (column >= WIDEST[0]) & (column < WIDEST[1]), held[..., :HISTOGRAMS_AT]
    sums.copy_(torch.where(most, torch.maximum(sums, new), sums + new))
    bins = _bins(by_head.flatten(2, 3), counted.flatten(2, 3)).flatten(2)
    held[..., HISTOGRAMS_AT:LAST_AT].scatter_add_(-1, bins, torch.ones_like(bins, dtype=held.dtype))
    held[..., LAST_AT:].copy_(_last(by_head[..., -1, :], counted[..., -1, :]))


def _sums(figures: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return a step's ``COLUMNS``, float64 [B, K, columns], from figures and counters of each query row, [B, K, rows, ...].

    Over the rows, figures are summed and maximised, counters summed, and rungs and causes counted.
    """
    by_row = figures.to(torch.float64)
    rung, causes = counts[..., Count.RUNG], counts[..., Count.CAUSES]
    # All columns of a kind at once: one at a time, each would be a kernel.
    rungs = rung.unsqueeze(-1) == torch.arange(len(Rung), device=rung.device)
    bits = (causes.unsqueeze(-1) >> torch.arange(len(Cause), device=causes.device)) & 1
    kinds = [counts[..., : len(COUNTED)], rungs.to(counts.dtype), bits.to(counts.dtype)]
    counters = in_a_row(kinds, sum(kind.shape[-1] for kind in kinds)).sum(2).to(torch.float64)
    steps = by_row.new_ones(*by_row.shape[:2], 1)
    return in_a_row([steps, steps * rung.shape[-1], by_row.sum(2), by_row.amax(2), counters], len(COLUMNS))


def _bins(figures: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the histogram index that each row [B, K, rows, ...] counts in, int64 [B, K, rows, BINNED]."""
    columns = [
        (figures[..., each] if isinstance(each, Figure) else counts[..., each]).to(torch.float32) + torch.zeros_like(figures[..., 0])
        for each in BINNED
    ]
    bits = side_by_side(columns).view(torch.int32)
    index = ((bits >> 21) - FIRST_BITS).clamp(0, BINS - 1).to(torch.int64)
    return index + BINS * torch.arange(len(BINNED), device=index.device)


def _last(figures: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the last-step columns [B, K, 1 + LAST_HEADS * LAST_WIDTH] from figures and counters [B, K, G, ...] of its newest query."""
    kept = min(figures.shape[2], LAST_HEADS)
    rows = in_a_row([figures[:, :, :kept].to(torch.float64), counts[:, :, :kept].to(torch.float64)], LAST_WIDTH)
    heads = torch.full_like(rows[:, :, :1, 0], figures.shape[2])
    return in_a_row([heads, rows.flatten(2)], TELEMETRY - LAST_AT)


def _kinds(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two masks over telemetry columns: columns reduced by max, and columns that every step overwrites."""
    column = torch.arange(TELEMETRY, device=device)
    return (column >= WIDEST[0]) & (column < WIDEST[1]), column >= LAST_AT


def own_rows(plane: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return a plane as [B, K, numbers], net of the counts ``before`` that a copied cache inherited; maxima and the last step stay."""
    if before is None:
        return plane[0, :, :, 0]
    most, last = _kinds(plane.device)
    return torch.where(most | last, plane, plane - before)[0, :, :, 0]


def added_up(planes: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
    """Return the sum of telemetry planes of one device, [1, 1, 1, 1, columns]; does not wait for the device.

    ``planes``: each plane with the counts that its cache inherited as a copy, which are subtracted, or None. Columns of maxima get the
    largest number; those that every step overwrites get 0.
    """
    with torch.no_grad():
        most, last = _kinds(planes[0][0].device)
        joined = torch.cat([own_rows(plane, before).flatten(0, 1) for plane, before in planes])
        # An infinite number in a last step must not become NaN.
        summed = torch.where(most, joined.amax(0), torch.where(last, 0, joined).sum(0))
        return summed[None, None, None, None]
