"""A report as one HTML page: no script, nothing loaded from elsewhere, every text of a model escaped by the template."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from kvcompile.report.data import ReportFields
from kvcompile.report.detail import GraphDetail, KernelText, SiteDetail
from kvcompile.report.graphs import GraphReport, SiteReport, SiteState, alike, place_of, refusal_facts
from kvcompile.report.highlight import highlighted, rules
from kvcompile.report.notices import NOTHING, Level, notices
from kvcompile.report.wording import count_text, short_paths, size_text

GONE = "the backend, or its record of this graph, is gone: call html() while the backend is alive"


@dataclass(frozen=True)
class Bar:
    """A bar of the page: ``nbytes`` bytes, drawn as a share of ``most``, the largest number of bytes in its group of bars.

    ``kept``: whether a store holds them. ``ratio``: text beside the number.
    """

    label: str
    nbytes: int
    most: int
    kept: bool = True
    ratio: str = ""

    @property
    def share(self) -> float:
        """The length of the bar, in percent; 0 if the largest number of bytes is 0."""
        return 100.0 * self.nbytes / self.most if self.most else 0.0


@dataclass(frozen=True)
class Row:
    """Rewritten sites that differ only in the module path: the first of them, all paths, its state and its part of the graph."""

    site: SiteReport
    paths: tuple[str, ...]
    state: SiteState
    source: tuple[str, str]
    bars: tuple[Bar, ...]
    detail: SiteDetail | None


@dataclass(frozen=True)
class Refused:
    """One refused attention: its facts and its part of the graph."""

    path: str
    facts: tuple[tuple[str, str], ...]
    source: tuple[str, str]
    evidence: tuple[str, ...]
    detail: SiteDetail | None


@dataclass(frozen=True)
class GraphSection:
    """One graph of the page: its rows of rewritten sites, its refused attentions and its kernels.

    ``found``: whether details of the graph were available.
    """

    graph: GraphReport
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    kernels: tuple[KernelText, ...]
    found: bool


def page(report: ReportFields) -> str:
    """Return a report as an HTML page."""
    source = report.source()
    sections = [_section(graph, source.detail(graph.index) if source is not None else None) for graph in report.graphs]
    schemes = sorted({site.scheme for graph in report.graphs for site in graph.sites})
    text = _template().render(
        report=report, sections=sections, notices=notices(report) if report.graphs else [], nothing=NOTHING, gone=GONE, schemes=schemes,
        live=_live(report), telemetry=source.telemetry_text() if source is not None else "", Level=Level, SiteState=SiteState,
        style=Markup(_read("style.jinja")), light=rules(dark=False), dark=rules(dark=True), torch=torch.__version__,
        length=f"at {report.tokens:,} tokens" if report.tokens is not None else "as captured",
    )
    return text + "\n"


@functools.cache
def _template() -> Any:
    made = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )
    made.filters.update(size=size_text, count=count_text, short=short_paths, highlighted=highlighted)
    return made.from_string(_read("page.jinja"))


def _read(name: str) -> str:
    return resources.files("kvcompile.report").joinpath(name).read_text(encoding="utf-8")


def _section(graph: GraphReport, detail: GraphDetail | None) -> GraphSection:
    known = detail or GraphDetail()
    numbers = {id(site): place for place, site in enumerate(graph.sites)}
    rows = tuple(
        _row(graph, group, known.sites[numbers[id(group[0])]] if numbers[id(group[0])] < len(known.sites) else None)
        for group in alike(graph.sites)
    )
    refused = tuple(
        Refused(
            refusal.path, tuple(fact for fact in refusal_facts(refusal) if fact[0] != "line"), _source(refusal.line), refusal.evidence,
            known.refused[place] if place < len(known.refused) else None,
        ) for place, refusal in enumerate(graph.refusals)
    )
    return GraphSection(graph, rows, refused, known.kernels, detail is not None)


def _row(graph: GraphReport, group: list[SiteReport], detail: SiteDetail | None) -> Row:
    site, states = group[0], {graph.state(item) for item in group}
    before, after = site.bytes_before * len(group), site.bytes_after * len(group)
    ratio = f"{after / before:.1%}" if before else ""
    bars = (Bar("dense", before, max(before, after), False), Bar("stored", after, max(before, after), ratio=ratio))
    paths = tuple(place_of(item) for item in group)
    state = SiteState.VALIDATED if states == {SiteState.VALIDATED} else SiteState.REWRITTEN
    return Row(site, paths, state, _source(site.line), bars, detail)


def _source(line: str) -> tuple[str, str]:
    """Return (file:line, text of the line) of a source line of the model."""
    where, _, text = short_paths(line).partition(": ")
    return where, text


def _live(report: ReportFields) -> tuple[Bar, ...]:
    """Return the bars for the bytes of live caches: held now, of a dense cache, of the caller's own tensors, and the most ever held.

    Empty if there never was a cache.
    """
    if not (report.allocated or report.peak):
        return ()
    peak = max(report.peak, report.allocated)
    most = max(report.allocated, report.dense, report.callers, peak)
    named = (
        ("held now", report.allocated, True), ("a dense cache of this length", report.dense, False),
        ("the caller's own tensors", report.callers, False), ("most held at once", peak, True),
    )
    return tuple(Bar(label, nbytes, most, kept) for label, nbytes, kept in named)
