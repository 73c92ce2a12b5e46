"""The report of a backend: sites rewritten, sites refused with the reason, bytes before and after. Reads values of the pipeline only."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvcompile.passes.graph.shapes import estimate
from kvcompile.passes.match.mask.masks import describe
from kvcompile.passes.match.sites import Refusal, Slot
from kvcompile.passes.plan.plan import BATCH, TOKENS, Plan, SitePlan
from kvcompile.schemes import Churn, Scheme
from kvcompile.types import Role

LONGEST_PATH = 36
"""Longest module path, in characters, that is never wrapped."""

REPORTS = (
    "certify with fallback='report' reads all keys and values a second time at every step, in float64, to bound its error; "
    "nothing falls back"
)


NOTHING = (
    "no graph was compiled with this backend so far: call the compiled model, then ask again. torch.compile(model, backend=b) compiles "
    "calls of model(...) alone, and generate() calls the uncompiled forward: write model.forward = torch.compile(model.forward, backend=b)"
)


@dataclass(frozen=True)
class SiteReport:
    """One rewritten site as text and numbers.

    ``tokens``: new tokens per call; ``bytes_before``, ``bytes_after``: at the reported cache length.
    """

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
    tokens: int = 1


@dataclass
class GraphReport:
    """One captured graph: its sites, its refusals, and the seconds that our passes and the inner compiler took.

    ``uncached``: attentions without a cache. ``variants``: names of the rewritten variants that were compiled.
    ``kernels``: for each of these, the operations that the sites became.
    ``validated``: sites that were run against their rewritten twin and gave equal results.
    ``unvalidated``: sites that could not be run and were rewritten all the same (``validate="where possible"``), each with the reason.
    ``notes``: other differences from the uncompiled model.
    ``left_out``: module paths of attentions that the policy leaves unchanged.
    """

    index: int
    sites: tuple[SiteReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    uncached: int = 0
    variants: tuple[str, ...] = ()
    pass_seconds: float = 0.0
    compile_seconds: float = 0.0
    kernels: tuple[str, ...] = ()
    validated: int = 0
    unvalidated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def paths(self) -> set[str]:
        """Module paths of the graph's attentions, rewritten or not."""
        found = [*(item.path for item in self.sites), *(item.path for item in self.refusals), *self.left_out]
        return {path for path in found if path}

    def take(self, other: GraphReport) -> None:
        """Copy every field of ``other``, a report of an equal graph, except its index and seconds."""
        for item in dataclasses.fields(self):
            if item.name not in {"index", "pass_seconds", "compile_seconds"}:
                setattr(self, item.name, getattr(other, item.name))


@dataclass
class Report:
    """All graphs that one backend compiled, and its live stores, in bytes.

    ``announced``: bytes as the scheme announces them for the stored tokens; ``allocated``: bytes that stores hold; ``hosted``: the part of
        ``allocated`` in pinned host memory; ``dense``: bytes of a dense cache of the same tokens.
    ``never_calibrated``: how keys are encoded, once for each live store whose scheme calibrates on queries and that never saw any.
    ``tokens``: the cache length that ``SiteReport`` bytes are for; None for the captured length.
    ``widths``: stored tokens by bits per channel, for keys and for values, over rows and layers, of adaptive schemes.
    ``churn``: counts of width changes. ``originals``: the part of ``allocated`` that holds full-precision copies outside the budget.
    ``unmatched``: policy entries that match no attention seen so far.
    ``disorder``: one message per row of a live cache whose tokens came out of order; attention returns NaN for such a row.
    ``stayed_dense``: caches that calls of rewritten graphs left dense or made dense, each with the reason.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    announced: int = 0
    allocated: int = 0
    dense: int = 0
    hosted: int = 0
    never_calibrated: list[str] = field(default_factory=list)
    tokens: int | None = None
    widths: dict[Role, dict[int, int]] = field(default_factory=dict)
    churn: Churn = field(default_factory=Churn)
    originals: int = 0
    unmatched: tuple[str, ...] = ()
    disorder: list[str] = field(default_factory=list)
    stayed_dense: tuple[str, ...] = ()

    def count_widths(self, role: Role, histogram: Mapping[int, int], churn: Churn) -> None:
        """Add the tokens of one live store by bits per channel (``histogram``), and its counts of width changes."""
        held = self.widths.setdefault(role, {})
        for bits, count in histogram.items():
            held[bits] = held.get(bits, 0) + count
        self.churn = self.churn + churn

    @property
    def sites(self) -> int:
        """Number of rewritten sites over all graphs."""
        return sum(len(graph.sites) for graph in self.graphs)

    @property
    def refusals(self) -> list[Refusal]:
        """Refusals of all graphs."""
        return [refusal for graph in self.graphs for refusal in graph.refusals]

    def __rich__(self) -> RenderableType:
        return Group(*(_graph(graph, self.tokens) for graph in self.graphs), _footer(self))

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def short_scheme(scheme: Scheme) -> str:
    """Return a scheme as a user writes it: its name, and only the options that differ from their defaults."""
    changed = []
    for option in scheme.options():
        value = getattr(scheme, option.name)
        if value != option.default:
            changed.append(f"{option.name}={str(getattr(value, 'value', value)).removeprefix('torch.')}")
    return f"{scheme.name}({','.join(changed)})" if changed else scheme.name


def _cache(slot: Slot) -> str:
    """Return a phrase for the kind of cache that a slot is stored in."""
    words = slot.kind.facts.cache
    if slot.block_table is not None:
        return f"{words}, read through a gather"
    return words if slot.sliding is None else f"{words}, newest {slot.sliding.slots}"


def site_report(item: SitePlan, tokens: int | None = None) -> SiteReport:
    """Return a planned site as a report row, with bytes for the captured batch and ``tokens`` tokens (None: the captured length)."""
    site = item.site
    at = {BATCH: estimate(site.key.batch), TOKENS: tokens if tokens is not None else estimate(site.key.capacity)}
    schemes = [short_scheme(item.key.scheme), short_scheme(item.value.scheme)]
    warnings = {part.scheme.warning for part in item.parts if part.scheme.warning} | ({REPORTS} if item.certify is not None else set())
    keys = [part for part in (item.key, item.extra_key) if part is not None]
    width = sum(part.spec.head_dim for part in item.parts)
    bits = sum(part.scheme.bits_per_value(part.spec) * part.spec.head_dim for part in item.parts) / width
    return SiteReport(
        site.path, site.line, site.attention.idiom, site.key.write.idiom, _cache(site.key), describe(site.bounds),
        f"{site.heads}/{site.key.heads} x {'+'.join(str(part.spec.head_dim) for part in keys)}",
        schemes[0] if schemes[0] == schemes[1] else f"keys {schemes[0]}, values {schemes[1]}",
        bits, int(sum(part.bytes_before for part in item.parts).subs(at)), int(sum(part.bytes_after for part in item.parts).subs(at)),
        tuple(sorted(warnings)), estimate(site.tokens),
    )


def graph_report(index: int, plan: Plan, uncached: int, tokens: int | None = None) -> GraphReport:
    """Return the report of one planned graph; ``uncached`` counts attentions without a cache."""
    return GraphReport(index, tuple(site_report(item, tokens) for item in plan.sites), plan.refusals, uncached)


def size_text(count: float) -> str:
    """Return a number of bytes as text in binary units, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError


def short_paths(text: str) -> str:
    """Return ``text`` with every path into ``site-packages`` shortened to begin at the package."""
    return re.sub(r"\S*/(?:site|dist)-packages/", "", text)


def count_text(count: int, what: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _merged(sites: tuple[SiteReport, ...]) -> list[tuple[SiteReport, int]]:
    """Return sites that differ in the module path only as one row each, with their count."""
    groups: dict[tuple[object, ...], list[SiteReport]] = {}
    for site in sites:
        key = (site.idiom, site.write, site.cache, site.mask, site.heads, site.scheme, site.bytes_before, site.bytes_after)
        groups.setdefault(key, []).append(site)
    return [(items[0], len(items)) for items in groups.values()]


def _graph(graph: GraphReport, tokens: int | None) -> RenderableType:
    title = Text(f"graph {graph.index}", style="bold")
    if graph.sites:
        title.append(f" ({count_text(graph.sites[0].tokens, 'new token')} a call)", style="not bold")
    words = [f"{count_text(len(graph.sites), 'attention')} rewritten"]
    words += [f"{graph.validated} validated"] if graph.sites else []
    words += [f"{len(graph.refusals)} refused"] if graph.refusals else []
    words += [f"{len(graph.left_out)} left out by the policy"] if graph.left_out else []
    words += [f"{graph.uncached} attention-like without a cache"] if graph.uncached else []
    title.append(": " + ", ".join(words), style="not bold")
    parts: list[RenderableType] = [title]
    if graph.sites:
        parts.append(_site_table(graph, tokens))
    parts += [Padding(Text(f"kernels, {line}"), (0, 0, 0, 1)) for line in graph.kernels]
    parts += [Padding(Text(f"not validated: {short_paths(line)}", style="yellow"), (0, 0, 0, 1)) for line in graph.unvalidated]
    parts += [Padding(Text(f"note: {line}", style="dim"), (0, 0, 0, 1)) for line in graph.notes]
    parts += [Padding(_refusal(refusal), (1, 0, 0, 1)) for refusal in graph.refusals]
    parts.append(Text())
    return Group(*parts)


def _where(site: SiteReport) -> str:
    """Return the site's module path, or ``file.py:12`` if Dynamo recorded none."""
    return site.path or site.line.partition(": ")[0].rpartition("/")[2]


def _site_table(graph: GraphReport, tokens: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 1))
    longest = max(len(_where(site)) for site in graph.sites)
    table.add_column("module", overflow="fold", no_wrap=longest <= LONGEST_PATH)
    table.add_column("attention", overflow="fold")
    table.add_column("stored as", overflow="fold")
    length = f"at {tokens:,} tokens" if tokens is not None else "as captured"
    table.add_column(f"cache {length}", justify="right", no_wrap=True)
    for site, count in _merged(graph.sites):
        where = escape(_where(site))
        before, after = site.bytes_before * count, site.bytes_after * count
        heads, _, dim = site.heads.partition(" x ")
        share = f"\n{after / before:.1%}" if before else ""
        table.add_row(
            where + (f"\n[dim]and {count - 1} more like it[/]" if count > 1 else ""),
            f"{site.idiom}, {heads} heads of {dim}\n[dim]mask: {escape(site.mask)}\ncache: {site.write}, {site.cache}[/]",
            f"{escape(site.scheme)}\n[dim]{site.bits:.2f} bits a value[/]",
            f"{size_text(before)} → {size_text(after)}[dim]{share}[/]",
        )
    return table


def _refusal(refusal: Refusal) -> Text:
    """Return a refusal as a list of facts: its sentences and source lines are too long for table cells."""
    text = Text()
    text.append(f"refused, stays as it was: {refusal.path or 'an attention'}", style="bold yellow")
    facts = (
        ("why", refusal.reason), ("stage", refusal.stage.value), ("line", short_paths(refusal.line)), ("nearest", refusal.nearest),
        ("do", refusal.advice),
    )
    for name, value in facts:
        if value:
            text.append(f"\n  {name:8}", style="dim").append(value)
    return text


def _footer(report: Report) -> Text:
    refused = f", {len(report.refusals)} refused" if report.refusals else ""
    if not report.graphs:
        return Text(NOTHING, style="bold yellow")
    text = Text(f"{count_text(len(report.graphs), 'graph')}, {count_text(report.sites, 'attention')} rewritten{refused}", style="bold")
    if report.allocated:
        ratio = f" ({report.allocated / report.dense:.1%})" if report.dense else ""
        hosted = f", {size_text(report.hosted)} of it in pinned host memory" if report.hosted else ""
        text.append(
            f"\nlive caches: {size_text(report.allocated)} allocated{hosted}, {size_text(report.announced)} announced, in place of "
            f"{size_text(report.dense)} dense{ratio}", style="not bold",
        )
    if report.originals:
        read = report.allocated - report.originals
        ratio = f" ({read / report.dense:.1%} of dense)" if report.dense else ""
        text.append(
            f"\ntier 2: {size_text(report.originals)} of that are originals, which steps do not read; the rest is {size_text(read)}{ratio}",
            style="not bold",
        )
    for role, histogram in report.widths.items():
        total = sum(histogram.values())
        listed = ", ".join(f"{bits} bits {count / total:.1%}" for bits, count in sorted(histogram.items()))
        text.append(f"\n{role.value}s of {count_text(total, 'stored token')}: {listed or 'none'}", style="not bold")
    if report.churn.allocations:
        churn = report.churn
        text.append(
            f"\nwidths: {count_text(churn.allocations, 'reallocation')}, {churn.moved} widths of settled tokens changed, {churn.promoted} "
            f"of them promotions, {churn.refused} promotions refused", style="not bold",
        )
    if report.never_calibrated:
        text.append(
            f"\nwarning: {count_text(len(report.never_calibrated), 'live key store')} never saw the queries that "
            f"filled it, so its keys are encoded {', '.join(sorted(set(report.never_calibrated)))}: fill the cache in a compiled call",
            style="not bold yellow",
        )
    for line in report.disorder:
        text.append(f"\nerror: {line}", style="not bold red")
    for glob in report.unmatched:
        text.append(f"\nwarning: the policy's entry {glob!r} matches none of the attentions seen so far", style="not bold yellow")
    for line in report.stayed_dense:
        text.append(f"\nwarning: some calls left a cache dense, at {short_paths(line)}", style="not bold yellow")
    for warning in sorted({w for graph in report.graphs for site in graph.sites for w in site.warnings}):
        text.append(f"\nwarning: {warning}", style="not bold yellow")
    return text
