"""Notices: the sentences of a report about all graphs and live caches together, each with a level; text and page show the same."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from kvcompile.report.data import ReportFields
from kvcompile.report.wording import count_text, short_paths, size_text

NOTHING = (
    "no graph was compiled with this backend so far: call the compiled model, then ask again. torch.compile(model, backend=b) compiles "
    "calls of model(...) alone, and generate() calls the uncompiled forward: write model.forward = torch.compile(model.forward, backend=b)"
)


class Level(enum.Enum):
    """The level at which a notice is shown: as information, a warning or an error."""

    TITLE = ""
    PLAIN = "note"
    WARNING = "warning"
    ERROR = "error"


class Notice(NamedTuple):
    """One sentence of a report."""

    level: Level
    text: str

    @property
    def line(self) -> str:
        """The sentence with the word of its level, as text shows it."""
        return f"{self.level.value}: {self.text}" if self.level in {Level.WARNING, Level.ERROR} else self.text


def notices(report: ReportFields) -> list[Notice]:
    """Return all notices of a report, its title first."""
    refused = f", {len(report.refusals)} refused" if report.refusals else ""
    title = f"{count_text(len(report.graphs), 'graph')}, {count_text(report.sites, 'attention')} rewritten{refused}"
    return [
        Notice(Level.TITLE, title), *(Notice(Level.PLAIN, line) for line in _plain(report)),
        *(Notice(Level.ERROR, line) for line in report.disorder), *(Notice(Level.WARNING, line) for line in _warnings(report)),
    ]


def _plain(report: ReportFields) -> Iterator[str]:
    """Yield the notices that are neither warnings nor errors: bytes of live caches, widths of adaptive schemes."""
    if report.allocated:
        yield _live(report)
    if report.shared:
        yield f"forks: {size_text(report.shared)} more are shared until they are written, and counted once"
    if report.peak > report.allocated:
        yield f"most that caches held at once: {size_text(report.peak)}"
    if report.originals:
        read = report.allocated - report.originals
        ratio = f" ({read / report.dense:.1%} of dense)" if report.dense else ""
        yield (
            f"tier 2: {size_text(report.originals)} of that are full-precision copies, which steps do not read; the rest is "
            f"{size_text(read)}{ratio}"
        )
    for role, histogram in report.widths.items():
        total = sum(histogram.values())
        listed = ", ".join(f"{bits} bits {count / total:.1%}" for bits, count in sorted(histogram.items()))
        yield f"{role.value}s of {count_text(total, 'stored token')}: {listed or 'none'}"
    if report.churn.allocations:
        churn = report.churn
        yield (
            f"widths: {count_text(churn.allocations, 'reallocation')}, {churn.moved} widths of settled tokens changed, {churn.promoted} "
            f"of them promotions, {churn.refused} promotions refused"
        )


def _warnings(report: ReportFields) -> Iterator[str]:
    if report.never_calibrated:
        yield (
            f"{count_text(len(report.never_calibrated), 'live key store')} never saw the queries that "
            f"filled it, so its keys are encoded {', '.join(sorted(set(report.never_calibrated)))}: fill the cache in a compiled call"
        )
    for glob in report.unmatched:
        yield f"the policy's entry {glob!r} matches none of the attentions seen so far"
    for line in report.stayed_dense:
        yield f"some calls left a cache dense, at {short_paths(line)}"
    slow = {line for graph in report.graphs for line in graph.slow}
    yield from sorted({warning for graph in report.graphs for site in graph.sites for warning in site.warnings} | slow)


def _live(report: ReportFields) -> str:
    """Return the bytes of live caches: held now, of a dense cache of the same tokens, and of the tensors that the caller made."""

    def share(of: int) -> str:
        return f" (held: {report.allocated / of:.1%} of it)" if of else ""

    hosted = f", {size_text(report.hosted)} of it in pinned host memory" if report.hosted else ""
    return (
        f"live caches: {size_text(report.allocated)} allocated{hosted}, {size_text(report.announced)} announced; a dense cache of this "
        f"length: {size_text(report.dense)}{share(report.dense)}; the caller's own: {size_text(report.callers)}{share(report.callers)}"
    )
