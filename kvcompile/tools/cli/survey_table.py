"""The survey as a table with one row per architecture: for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcompile.tools.cli.survey import Survey
from kvcompile.tools.cli.trial import Case, CaseOutcome

WORST = (
    CaseOutcome.WRONG, CaseOutcome.FAILED, CaseOutcome.REFUSED, CaseOutcome.PARTLY, CaseOutcome.RECOMPILES, CaseOutcome.REWRITTEN,
    CaseOutcome.NOT_CAPTURED, CaseOutcome.NO_CACHE, CaseOutcome.NOT_RUN,
)
"""Outcomes, worst first: an architecture has the worst outcome of its cases. Outcomes that say nothing about this backend come last."""
FIELDS = ("architecture", "outcome", "sites", "dense", "scheme", "graphs", "stock", "why")
"""Columns of the CSV; ``dense`` and ``scheme``: largest differences of logits; ``graphs`` and ``stock``: graphs of this backend and of
stock."""
STYLES = {
    CaseOutcome.WRONG: "bold red", CaseOutcome.FAILED: "red", CaseOutcome.REFUSED: "yellow", CaseOutcome.PARTLY: "yellow",
    CaseOutcome.REWRITTEN: "green",
}


def by_architecture(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases grouped by architecture, in order."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        found[case.architecture].append(case)
    return dict(found)


def verdict(cases: Sequence[Case]) -> CaseOutcome:
    """Return the worst outcome of one architecture's cases."""
    outcomes = {CaseOutcome(case.outcome) for case in cases}
    return next(outcome for outcome in WORST if outcome in outcomes)


def tally(cases: Iterable[Case]) -> Counter[CaseOutcome]:
    """Return the number of architectures with each outcome."""
    return Counter(verdict(items) for items in by_architecture(cases).values())


def survey_table(cases: Sequence[Case]) -> RenderableType:
    """Return the table and its summary, for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name, right in (("architecture", False), ("outcome", False), ("sites", True), ("dense", True), ("scheme", True), ("graphs", True)):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    for name, items in by_architecture(cases).items():
        outcome = verdict(items)
        table.add_row(
            escape(name), Text(outcome.value, style=STYLES.get(outcome, "dim")), _span(case.sites for case in items if case.sites),
            _worst(case.error_dense for case in items), _worst(case.error_scheme for case in items),
            _graphs(items), escape("; ".join(_reasons(items))),
        )
    return Group(table, Text(summary(cases), style="bold"))


def summary(cases: Sequence[Case]) -> str:
    """Return the sentence of ``in_words`` for some cases."""
    return in_words(tally(cases))


def in_words(counts: Mapping[CaseOutcome, int]) -> str:
    """Return a sentence that states how many architectures are rewritten at every site, out of those that apply; ``counts``: by outcome."""
    inside = {outcome: count for outcome, count in counts.items() if not outcome.outside}
    total, whole = sum(inside.values()), inside.get(CaseOutcome.REWRITTEN, 0)
    share = f" ({whole / total:.1%})" if total else ""
    others = [outcome for outcome in CaseOutcome if counts.get(outcome) and outcome is not CaseOutcome.REWRITTEN]
    rest = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in others)
    return f"{whole} of {total} architectures that cache softmax attention and that stock can capture: every site rewritten{share}" + (
        f"; {rest}" if rest else ""
    )


def _reasons(cases: Sequence[Case]) -> list[str]:
    """Return the reasons of refusals and failures, each once with the cases that have it."""
    where: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        outcome = CaseOutcome(case.outcome)
        said = case.refused or ((case.detail,) if outcome is not CaseOutcome.REWRITTEN else ())
        for reason in said if not case.detail or outcome is CaseOutcome.REWRITTEN else (*case.refused, case.detail):
            if reason and f"{case.cache} {case.attention}" not in where[reason]:
                where[reason].append(f"{case.cache} {case.attention}")
    return [reason if len(seen) == len(cases) else f"{', '.join(seen)}: {reason}" for reason, seen in where.items()]


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _worst(errors: Iterable[float | None]) -> str:
    found = [error for error in errors if error is not None]
    return f"{max(found):.0e}" if found else ""


def _most_graphs(cases: Sequence[Case]) -> tuple[int, int]:
    """Return (graphs of this backend, graphs of stock) of the case that compiled most; (0, 0) if none compiled."""
    return max(((case.graphs, case.stock_graphs) for case in cases if case.graphs), default=(0, 0))


def _graphs(cases: Sequence[Case]) -> str:
    ours, stock = _most_graphs(cases)
    return f"{ours} / {stock}" if stock else str(ours or "")


def as_csv(cases: Sequence[Case]) -> str:
    """Return the table as CSV, one row per architecture, sorted by name."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(FIELDS)
    for name, items in sorted(by_architecture(cases).items()):
        table.writerow((
            name, verdict(items).value, _span(case.sites for case in items if case.sites), _worst(case.error_dense for case in items),
            _worst(case.error_scheme for case in items), *(count or "" for count in _most_graphs(items)), "; ".join(_reasons(items)),
        ))
    return text.getvalue()


def about(survey: Survey) -> str:
    """Return a paragraph for a page of the survey: versions, models, and the meaning of the columns."""
    import transformers

    settings = survey.settings
    return (
        f"Made by `kvcompile survey` (transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}): tiny random "
        f"float32 models, caches {', '.join(survey.caches)}, attention {', '.join(survey.attentions)}, batch "
        f"{' and '.join(map(str, settings.rows))} (more than one row: left padded), a prompt of {settings.prompt} tokens and "
        f"{settings.steps} steps, everything compiled. `dense` and `{settings.scheme}`: the largest difference of logits from the "
        "uncompiled model, as a share of the largest logit. Graphs: ours and those of stock `torch.compile`, of the case with most. "
        "`+encoder`: the encoder-decoder model; without: the decoder alone."
    )
