"""Table: the results of a run as a table on the screen, as CSV and as JSON, and counts of such CSV files as markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.accept.outcomes import Outcome, Result

ORDER = list(Outcome)
COLUMNS = ("case", "outcome", "error / allowed", "eager", "control", "graphs / stock", "s", "why")
FIELDS = ("case", "outcome", "error", "allowed", "eager", "control", "graphs", "stock", "seconds", "why")
INSTALLED = re.compile(r"/\S*/site-packages/")
"""The part of a path in an error's text that names the machine."""


def sorted_results(results: Sequence[Result]) -> list[Result]:
    """Return results with failures last, where a terminal shows them."""
    return sorted(results, key=lambda item: (ORDER.index(item.outcome), item.id))


def summary(results: Sequence[Result]) -> str:
    """Return the number of results of each outcome, in words."""
    return in_words(result.outcome for result in results)


def in_words(outcomes: Iterable[Outcome]) -> str:
    """Return the number of cases and the number of each outcome, in words."""
    counts = Counter(outcomes)
    return f"{counts.total()} cases: " + ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in ORDER if counts[outcome])


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


def as_csv(results: Sequence[Result]) -> str:
    """Return the results of a run as CSV, one row a case, by name."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(FIELDS)
    for result in sorted(results, key=lambda item: item.id):
        errors = ("" if value is None else f"{value:.0e}" for value in (result.error, result.tolerance, result.eager, result.control))
        graphs = (result.graphs or "", "" if result.stock is None or not result.graphs else result.stock)
        why = INSTALLED.sub("", result.detail)
        table.writerow((result.id, result.outcome.value, *errors, *graphs, f"{result.seconds:.0f}", why))
    return text.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file that ``as_csv`` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def count_table(paths: Sequence[Path]) -> str:
    """Return a markdown table of the cases of each outcome in CSV files, a column a file; refused cases are counted by reason."""
    counts = []
    for path in paths:
        rows = [(Outcome(row["outcome"]), row["why"]) for row in read_csv(path)]
        counts.append(Counter((outcome, why if outcome is Outcome.REFUSED else "") for outcome, why in rows))
    total = sum(counts, Counter[tuple[Outcome, str]]())
    keys = sorted(total, key=lambda key: (ORDER.index(key[0]), -total[key], key[1]))
    table = [("outcome", "why", *(path.stem for path in paths)), ("---",) * (2 + len(paths))]
    table += [(outcome.value, why, *(str(count[outcome, why]) for count in counts)) for outcome, why in keys]
    table.append(("all", "", *(str(count.total()) for count in counts)))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table) + "\n"


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Return the results of a run as JSON."""
    return json.dumps({**about, "results": [result.plain() for result in sorted_results(results)]}, indent=1) + "\n"
