"""The report: what was rewritten, what was refused and why, bytes before and after. Reads the pipeline's values only."""

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
"""Module paths up to this stay on one line."""

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
    """One rewritten site, in words and numbers; ``tokens`` new ones a call, bytes at a length."""

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
    """One captured graph: sites, refusals, and how long our passes and the inner compiler took (seconds).

    ``kernels`` says, for each variant that was made, which operations the sites became. ``unvalidated``: sites that could not be run beside
    their rewritten twins and were rewritten nevertheless (``validate="where possible"``), each with the reason; ``validated``: how many
    could, and did the same. ``notes``: what else differs from the uncompiled model. ``left_out``: module paths of
    attentions that the policy leaves as they are.
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
        """The module paths of its attentions, rewritten or not."""
        found = [*(item.path for item in self.sites), *(item.path for item in self.refusals), *self.left_out]
        return {path for path in found if path}

    def take(self, other: GraphReport) -> None:
        """Take over what ``other`` says of the same graph, but for its index and the time it took."""
        for item in dataclasses.fields(self):
            if item.name not in {"index", "pass_seconds", "compile_seconds"}:
                setattr(self, item.name, getattr(other, item.name))


@dataclass
class Report:
    """All graphs that one backend compiled, and the stores that live; ``tokens`` is the length that bytes are given for.

    ``hosted``: of the bytes allocated, those in pinned host memory. ``never_calibrated``: of each live store that holds tokens
    without the calibration by queries that its scheme has, how it encodes keys. ``widths``: tokens of live caches by their bits a channel,
    for keys and for values, over rows and layers, where a scheme gives tokens widths of their own; ``churn``: what changing them took;
    ``originals``: of the bytes allocated, those of originals that such a scheme keeps beside its budget. ``unmatched``: entries of the
    policy that match no attention seen so far. ``disorder``: of each row of a live cache whose tokens came out of order where no step
    looked, what was expected and found; attention gives NaN for it. ``stayed_dense``: caches that calls of rewritten graphs left dense,
    or made so, with the reasons.
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
        """Add one live store's tokens by bits, and what its reallocations changed."""
        held = self.widths.setdefault(role, {})
        for bits, count in histogram.items():
            held[bits] = held.get(bits, 0) + count
        self.churn = self.churn + churn

    @property
    def sites(self) -> int:
        """Sites rewritten, over all graphs."""
        return sum(len(graph.sites) for graph in self.graphs)

    @property
    def refusals(self) -> list[Refusal]:
        """Refusals, over all graphs."""
        return [refusal for graph in self.graphs for refusal in graph.refusals]

    def __rich__(self) -> RenderableType:
        return Group(*(_graph(graph, self.tokens) for graph in self.graphs), _footer(self))

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def short_scheme(scheme: Scheme) -> str:
    """A scheme as a user writes it: the name, and only the options that differ from their defaults."""
    changed = []
    for option in scheme.options():
        value = getattr(scheme, option.name)
        if value != option.default:
            changed.append(f"{option.name}={str(getattr(value, 'value', value)).removeprefix('torch.')}")
    return f"{scheme.name}({','.join(changed)})" if changed else scheme.name


def _cache(slot: Slot) -> str:
    """How a cache is held, in words."""
    words = slot.kind.facts.cache
    if slot.block_table is not None:
        return f"{words}, read through a gather"
    return words if slot.sliding is None else f"{words}, newest {slot.sliding.slots}"


def site_report(item: SitePlan, tokens: int | None = None) -> SiteReport:
    """A planned site as a report row; bytes for the captured batch and ``tokens`` (else the captured length)."""
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
    """The report of one planned graph."""
    return GraphReport(index, tuple(site_report(item, tokens) for item in plan.sites), plan.refusals, uncached)


def size_text(count: float) -> str:
    """Bytes for people: binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError


def short_paths(text: str) -> str:
    """Source files as the packages that they lie in: what stands before ``site-packages`` tells a reader nothing."""
    return re.sub(r"\S*/(?:site|dist)-packages/", "", text)


def count_text(count: int, what: str) -> str:
    """A count with its noun, in the plural where it is one."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _merged(sites: tuple[SiteReport, ...]) -> list[tuple[SiteReport, int]]:
    """Rows that differ only in their module path are one row with a count."""
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
    """The module path, or ``file.py:12`` where Dynamo recorded none."""
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
    """A refusal as a list of facts: sentences and source lines are too long for the cells of a table."""
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
