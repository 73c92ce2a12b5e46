"""The report: what was rewritten, what was refused and why, bytes before and after. Reads the pipeline's values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcompile.passes.masks import describe
from kvcompile.passes.plan import BATCH, TOKENS, Plan, SitePlan
from kvcompile.passes.sites import Refusal


@dataclass(frozen=True)
class SiteReport:
    """One rewritten site, in words and numbers."""

    path: str
    line: str
    idiom: str
    write: str
    cache: str
    mask: str
    heads: str
    scheme: str
    bits: float
    bytes_before: int
    bytes_after: int
    warnings: tuple[str, ...] = ()


@dataclass
class GraphReport:
    """One captured graph: sites, refusals, and how long our passes and the inner compiler took (seconds)."""

    index: int
    sites: tuple[SiteReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    uncached: int = 0
    variants: tuple[str, ...] = ()
    pass_seconds: float = 0.0
    compile_seconds: float = 0.0


@dataclass
class Report:
    """All graphs that one backend compiled, and the stores that live."""

    graphs: list[GraphReport] = field(default_factory=list)
    announced: int = 0
    allocated: int = 0
    dense: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def sites(self) -> int:
        """Sites rewritten, over all graphs."""
        return sum(len(graph.sites) for graph in self.graphs)

    @property
    def refusals(self) -> list[Refusal]:
        """Refusals, over all graphs."""
        return [refusal for graph in self.graphs for refusal in graph.refusals]

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for graph in self.graphs:
            parts.append(_graph_table(graph))
            if graph.refusals:
                parts.append(_refusal_table(graph))
        parts.append(_footer(self))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(self)
        return console.export_text()


def site_report(item: SitePlan, tokens: int | None = None) -> SiteReport:
    """A planned site as a report row; bytes for the captured batch and ``tokens`` (else the captured length)."""
    site = item.site
    at = {BATCH: site.key.batch, TOKENS: tokens if tokens is not None else site.key.capacity}
    schemes = [item.key.scheme.spell(), item.value.scheme.spell()]
    warnings = {part.scheme.warning for part in (item.key, item.value) if part.scheme.warning}
    bits = (item.key.scheme.bits_per_value(item.key.spec) + item.value.scheme.bits_per_value(item.value.spec)) / 2
    return SiteReport(
        site.path, site.line, site.attention.idiom, site.key.write.idiom, site.key.kind.value, describe(site.bounds),
        f"{site.heads}/{site.key.heads} x {site.key.head_dim}", schemes[0] if schemes[0] == schemes[1] else " | ".join(schemes),
        bits, int((item.key.bytes_before + item.value.bytes_before).subs(at)),
        int((item.key.bytes_after + item.value.bytes_after).subs(at)), tuple(sorted(warnings)),
    )


def graph_report(index: int, plan: Plan, uncached: int) -> GraphReport:
    """The report of one planned graph."""
    return GraphReport(index, tuple(site_report(item) for item in plan.sites), plan.refusals, uncached)


def size_text(count: float) -> str:
    """Bytes for people: binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError


def _merged(sites: tuple[SiteReport, ...]) -> list[tuple[SiteReport, int]]:
    """Rows that differ only in their module path are one row with a count."""
    groups: dict[tuple[object, ...], list[SiteReport]] = {}
    for site in sites:
        key = (site.idiom, site.write, site.cache, site.mask, site.heads, site.scheme, site.bytes_before, site.bytes_after)
        groups.setdefault(key, []).append(site)
    return [(items[0], len(items)) for items in groups.values()]


def _graph_table(graph: GraphReport) -> Table:
    title = f"graph {graph.index}: {len(graph.sites)} sites rewritten, {len(graph.refusals)} refused"
    if graph.uncached:
        title += f", {graph.uncached} without a cache"
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for name in ("module", "attention", "cache", "mask", "heads x D", "scheme", "bits", "before", "after"):
        table.add_column(name, justify="right" if name in {"bits", "before", "after"} else "left", overflow="fold")
    for site, count in _merged(graph.sites):
        where = site.path or site.line.rpartition("/")[2]
        table.add_row(
            where + (f" and {count - 1} more" if count > 1 else ""), site.idiom, f"{site.write} ({site.cache})", site.mask, site.heads,
            site.scheme, f"{site.bits:.2f}", size_text(site.bytes_before * count), size_text(site.bytes_after * count),
        )
    return table


def _refusal_table(graph: GraphReport) -> Table:
    table = Table(title="refused: left as they were", title_justify="left", title_style="bold yellow", header_style="bold")
    for name in ("module", "stage", "reason", "line", "nearest idiom", "what to do"):
        table.add_column(name, overflow="fold")
    for item in graph.refusals:
        table.add_row(item.path, item.stage.value, item.reason, item.line, item.nearest, item.advice)
    return table


def _footer(report: Report) -> Text:
    text = Text(f"{len(report.graphs)} graphs, {report.sites} sites rewritten, {len(report.refusals)} refused")
    if report.allocated:
        ratio = f" ({report.allocated / report.dense:.1%})" if report.dense else ""
        text.append(
            f"\nlive caches: {size_text(report.allocated)} allocated, {size_text(report.announced)} announced, in place of "
            f"{size_text(report.dense)} dense{ratio}"
        )
    for warning in sorted({w for graph in report.graphs for site in graph.sites for w in site.warnings}):
        text.append(f"\nwarning: {warning}", style="yellow")
    return text
