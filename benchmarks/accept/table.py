"""Table: the results of a run as a table on the screen, as markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.accept.outcomes import Outcome, Result

ORDER = list(Outcome)
COLUMNS = ("case", "outcome", "error / allowed", "eager", "control", "graphs / stock", "s", "why")


def sorted_results(results: Sequence[Result]) -> list[Result]:
    """Return results with failures last, where a terminal shows them."""
    return sorted(results, key=lambda item: (ORDER.index(item.outcome), item.id))


def summary(results: Sequence[Result]) -> str:
    """Return the number of results of each outcome, in words."""
    counts = Counter(result.outcome for result in results)
    return f"{len(results)} cases: " + ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in ORDER if counts[outcome])


def _cells(result: Result) -> tuple[str, ...]:
    errors = "" if result.error is None else f"{result.error:.0e} / {result.tolerance:.0e}"
    graphs = "" if not result.graphs else f"{result.graphs} / {'?' if result.stock is None else result.stock}"
    small = ("" if value is None else f"{value:.0e}" for value in (result.eager, result.control))
    return (result.id, result.outcome.value, errors, *small, graphs, f"{result.seconds:.0f}", result.detail)


def screen(results: Sequence[Result], everything: bool) -> Table:
    """Return the table of a run for a terminal: all results, or those that failed or did not run."""
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, title=summary(results))
    for result in sorted_results(results):
        if everything or result.outcome.failed or result.outcome is Outcome.NOT_RUN:
            table.add_row(*map(escape, _cells(result)), style="red" if result.outcome.failed else None)
    return table


def markdown(results: Sequence[Result], about: str) -> str:
    """Return the table of a run as a markdown page; ``about`` says when, where and with what it was made."""
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(result)) + " |" for result in reversed(sorted_results(results))]
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    said = f"{summary(results)}. How to read it: [ACCEPT.md](ACCEPT.md)."
    return "\n".join(["# Acceptance run", "", about, "", said, "", *head, *rows, ""])


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Return the results of a run as JSON."""
    return json.dumps({**about, "results": [result.plain() for result in sorted_results(results)]}, indent=1) + "\n"
