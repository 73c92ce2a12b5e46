"""A report on a terminal: tables and lines of rich."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvcompile.passes.match.sites import Refusal
from kvcompile.report.data import ReportFields
from kvcompile.report.graphs import GraphReport, SiteState, alike, place_of, refusal_facts
from kvcompile.report.notices import NOTHING, Level, notices
from kvcompile.report.wording import count_text, short_paths, size_text

LONGEST_PATH = 36
"""Longest module path, in characters, that is never wrapped."""


def shown(report: ReportFields) -> RenderableType:
    """Return a report as an object for rich to print: one group for each graph, then a footer."""
    return Group(*(_graph(graph, report.tokens) for graph in report.graphs), _footer(report))


def _graph(graph: GraphReport, tokens: int | None) -> RenderableType:
    title = Text(f"graph {graph.index}", style="bold")
    if graph.sites:
        title.append(f" ({count_text(graph.sites[0].tokens, 'new token')} a call)", style="not bold")
    title.append(f": {graph.words}", style="not bold")
    parts: list[RenderableType] = [title]
    if graph.sites:
        parts.append(_site_table(graph, tokens))
    parts += [Padding(Text(f"kernels, {line}"), (0, 0, 0, 1)) for line in graph.kernels]
    parts += [Padding(Text(f"not validated: {short_paths(line)}", style="yellow"), (0, 0, 0, 1)) for line in graph.unvalidated]
    parts += [Padding(Text(f"note: {line}", style="dim"), (0, 0, 0, 1)) for line in graph.notes]
    parts += [Padding(_refusal(refusal), (1, 0, 0, 1)) for refusal in graph.refusals]
    parts.append(Text())
    return Group(*parts)


def _site_table(graph: GraphReport, tokens: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 1))
    longest = max(len(place_of(site)) for site in graph.sites)
    table.add_column("module", overflow="fold", no_wrap=longest <= LONGEST_PATH)
    table.add_column("attention", overflow="fold")
    table.add_column("stored as", overflow="fold")
    length = f"at {tokens:,} tokens" if tokens is not None else "as captured"
    table.add_column(f"cache {length}", justify="right", no_wrap=True)
    for group in alike(graph.sites):
        site, count = group[0], len(group)
        where = escape(place_of(site))
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
    text.append(f"{SiteState.REFUSED.value}: {refusal.path or 'an attention'}", style="bold yellow")
    for name, value in refusal_facts(refusal):
        text.append(f"\n  {name:8}", style="dim").append(value)
    return text


STYLES = {Level.TITLE: "bold", Level.PLAIN: "not bold", Level.WARNING: "not bold yellow", Level.ERROR: "not bold red"}


def _footer(report: ReportFields) -> Text:
    if not report.graphs:
        return Text(NOTHING, style="bold yellow")
    lines = notices(report)
    text = Text("", style="bold")
    for place, notice in enumerate(lines):
        text.append(("\n" if place else "") + notice.line, style=STYLES[notice.level])
    return text
