"""``kvcompile explain --stage``: the seconds of each pass, and one graph as text after one pass."""

from __future__ import annotations

from rich import box
from rich.table import Table

from kvcompile.backend import Backend
from kvcompile.passes.match.match import match
from kvcompile.passes.plan.plan import plan
from kvcompile.report import Pass, Report
from kvcompile.tools.cli.dump import Dump
from kvcompile.tools.cli.normal_form import matched_form, normal_form

VERIFIED = "# verified: every plane has one append, ahead of every read of it; the graph is the one that `rewrite` made\n"


def pass_table(report: Report) -> Table:
    """Return a table of the milliseconds of each pass, with a column for each graph.

    Validation includes its runs of sites; ``compile`` is the inner compiler.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("pass")
    for graph in report.graphs:
        table.add_column(f"graph {graph.index}, ms", justify="right")
    for each in Pass:
        found = [graph.passes.get(each) for graph in report.graphs]
        if any(seconds is not None for seconds in found):
            table.add_row(each.value, *("" if seconds is None else f"{1000 * seconds:,.1f}" for seconds in found))
    return table


def pass_text(owner: Backend, asked: Pass, graph: int | None) -> str:
    """Return graph ``graph`` (None: the last one with a site) as text, in its state after the pass ``asked``.

    Raises NothingToDump if that pass was not reached.
    """
    made = Dump(owner, graph)
    captured, seconds = made.record.captured, made.record.report.passes.get(asked)
    assert captured is not None, "Dump chooses captured graphs alone"
    title = f"# graph {made.index} after {asked.value}{'' if seconds is None else f', {1000 * seconds:,.1f} ms'}\n"
    if asked is Pass.CAPTURE:
        return title + made.captured()
    if asked is Pass.MATCH:
        return title + matched_form(match(captured))
    if asked is Pass.PLAN:
        return title + normal_form(plan(match(captured), owner.policy))
    if asked is Pass.VALIDATE:
        return title + made.normalised()
    if asked is Pass.COMPILE:
        return title + made.inductor()
    return title + (VERIFIED if asked is Pass.VERIFY else "") + made.rewritten()
