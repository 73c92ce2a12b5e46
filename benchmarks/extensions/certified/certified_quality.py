"""Tables 3 to 10 of "Runtime-Certified Bounded-Error Quantized Attention" in kind: certified, and its codes alone, on a trained model.

    python benchmarks/extensions/certified/certified_quality.py --out DIR
            [options of kvcompile eval]     measures, by ``kvcompile eval``, and prints
    python benchmarks/extensions/certified/certified_quality.py --read DIR                                prints a run

Unless options say otherwise: tinylm-16k, prompts of 4,000, 8,000 and 16,000 bytes, 64 similar keys, 96 questions of each of four tasks.
Texts stand for PG-19, all questions for RULER, ``multiquery`` (several needles, right if all are) for NIAH. ``naive`` is the source's
baseline: int8 keys and int4 values, all checks off; ``int4`` has fewer bits for keys; ``dense`` is compiled and keeps all of them.
The sweeps are those of its Table 9 and section 9.4: ``k_max``, ``v_tol``, and values as they are. Differences are a scheme's less those of
the uncompressed model; lost questions are the source's "critical failures". A run without some of the schemes gives the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.schemes.certificate.policy import NAIVE
from kvcompile.tools.cli.main import main as kvcompile_main
from kvcompile.tools.evaluation.bench import labels
from kvcompile.tools.evaluation.measures import Measured, mean
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.statistics import Mean, Paired, Share, bootstrap

CERTIFIED, CODES = "certified", f"certified(certify={NAIVE.spec()})"
SETTINGS = {
    "K_max 64": "certified(certify=k_max:64)", "K_max 128": CERTIFIED, "K_max 256": "certified(certify=k_max:256)",
    "K_max 512": "certified(certify=k_max:512)", "v_tol 0.02": "certified(certify=v_tol:0.02)",
    "v_tol 0.005": "certified(certify=v_tol:0.005)", "16-bit values": "certified(values=full)",
}
"""The rows of Table 9, and those of the sweep of ``v_tol``."""
BASELINES = {"dense": "dense", "int4": "int4", "naive": CODES}
SCHEMES = tuple(dict.fromkeys((*BASELINES.values(), CERTIFIED, *SETTINGS.values())))
NEEDLES = "multiquery"
DEFAULTS = {
    "--lengths": "4000,8000,16000", "--keys": "64", "--tasks": "needle,multikey,multiquery,variable", "--questions": "96", "--tail": "128",
}


class Run:
    """A run's records: the uncompressed model, baselines, ``certified``, and its settings by name; those that the run has."""

    def __init__(self, results: Results) -> None:
        self.results, self.base = results, results.reference
        held = {row.scheme: row for row in results.schemes}
        named = {name: labels([scheme])[0][1] for name, scheme in {**BASELINES, CERTIFIED: CERTIFIED, **SETTINGS}.items()}
        self.by_name = {name: held[label] for name, label in named.items() if label in held}
        self.seed = int(results.config.get("seed", 0))
        self.certified = results.named(CERTIFIED)

    def paired(self, row: Measured, task: str | None = None, length: int | None = None) -> Paired:
        """Outcomes beside the uncompressed model's."""
        theirs, ours = ([item.right for item in each.picked(task, length)] for each in (self.base, row))
        return Paired.of(theirs, ours, self.seed)

    def bits(self, row: Measured, length: int) -> Mean:
        """Bits per byte more than the uncompressed model's at one length."""
        (mine,), (theirs,) = ([text.bits for text in each.texts if text.length == length] for each in (row, self.base))
        return bootstrap([a - b for a, b in zip(mine, theirs, strict=True)], self.seed)


def tables(run: Run) -> Iterator[Table]:
    """All of them, in order."""
    lengths = run.results.lengths
    columns = [f"{length:,}" for length in lengths]
    ours, base = run.certified, run.base
    table = _table(f"Table 3: certified less the uncompressed model, by {run.results.config['unit']} of prompt", "of", *columns)
    table.add_row("bits per byte", *(_more(run.bits(ours, length), "+.4f") for length in lengths))
    for name, task in ((NEEDLES, NEEDLES), ("all questions", None)):
        table.add_row(f"{name}, points", *(_more(run.paired(ours, task, length).difference, "+.1%") for length in lengths))
    yield table
    table = _table("Table 4: right answers; lost and won beside the uncompressed model", "of", *columns)
    for name, task in ((NEEDLES, NEEDLES), ("all questions", None)):
        table.add_row(f"{name}, uncompressed", *(_share(base.share(task, length)) for length in lengths))
        for label in (*BASELINES, CERTIFIED):
            if label in run.by_name:
                row = run.by_name[label]
                cells = (_share(row.share(task, length)) + _lost(run.paired(row, task, length)) for length in lengths)
                table.add_row(f"{name}, {label}", *cells)
    yield table
    table = _table("Table 5: bits per byte", "of", *columns)
    table.add_row("uncompressed", *(f"{mean(text.bits):.4f}" for text in base.texts))
    for label in (*BASELINES, CERTIFIED):
        if label in run.by_name:
            table.add_row(f"{label}, more", *(_more(run.bits(run.by_name[label], length), "+.5f") for length in lengths))
    yield table
    table = _table("Table 6: right answers of all tasks", "of", *columns)
    pairs = [run.paired(ours, None, length) for length in lengths]
    table.add_row("uncompressed", *(_share(base.share(None, length)) for length in lengths))
    table.add_row(CERTIFIED, *(_share(ours.share(None, length)) for length in lengths))
    table.add_row("points", *(_more(each.difference, "+.1%") for each in pairs))
    table.add_row("lost (critical)", *(str(each.lost) for each in pairs))
    yield table
    for number, length in ((7, lengths[-1]), (8, lengths[0])):
        yield by_task(run, number, length)
    yield sweep(run)
    table = _table(f"Table 10: {NEEDLES}, right if all that is asked for is", "", *columns)
    pairs = [run.paired(ours, NEEDLES, length) for length in lengths]
    table.add_row("uncompressed", *(f"{(each.both + each.lost) / max(1, each.trials):.1%}" for each in pairs))
    table.add_row(CERTIFIED, *(f"{(each.both + each.won) / max(1, each.trials):.1%}" for each in pairs))
    table.add_row("both, neither", *(f"{each.both}, {each.neither}" for each in pairs))
    table.add_row("uncompressed alone (critical)", *(str(each.lost) for each in pairs))
    table.add_row("certified alone", *(str(each.won) for each in pairs))
    table.add_row("McNemar's p", *(f"{each.p:.3f}" for each in pairs))
    yield table


def by_task(run: Run, number: int, length: int) -> Table:
    """Tables 7 and 8: one length by task."""
    title = f"Table {number}: {length:,} {run.results.config['unit']}, by task"
    table = _table(title, "task", "uncompressed", "certified", "points", "lost", "won")
    for task in run.base.tasks:
        pairs = run.paired(run.certified, task, length)
        shares = (_share(each.share(task, length)) for each in (run.base, run.certified))
        table.add_row(task, *shares, f"{pairs.difference.value:+.1%}", str(pairs.lost), str(pairs.won))
    return table


def sweep(run: Run) -> Table:
    """Table 9: settings of certified over all lengths."""
    tasks = run.base.tasks
    names = ("setting", *(f"{task}, points" for task in tasks), "all", "lost", "won", "p", "KL", "of dense", "values", "keys")
    title = "Table 9: K_max, v_tol and 16-bit values, all lengths; from originals: share of blocks (values), blocks a head-step (keys)"
    table = _table(title, *names)
    for name, row in run.by_name.items():
        if name == CERTIFIED:
            continue
        pairs, told = run.paired(row), row.asked
        steps = told.get("head_steps", 0.0)
        promoted = f"{told['values'] / max(1.0, told['blocks']):.1%}" if steps else ""
        table.add_row(
            name, *(f"{run.paired(row, task).difference.value:+.1%}" for task in tasks), _more(pairs.difference, "+.1%"),
            f"{pairs.lost}/{pairs.trials}", str(pairs.won), f"{pairs.p:.2g}", f"{row.kl:.2g}",
            f"{row.cache_bytes / row.dense_bytes:.1%}" if row.dense_bytes else "", promoted, f"{told['keys'] / steps:.0f}" if steps else "",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def _more(found: Mean, form: str) -> str:
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def _share(share: Share) -> str:
    return f"{share.hits}/{share.trials}"


def _lost(pairs: Paired) -> str:
    return f" ({pairs.lost}, {pairs.won}; p {pairs.p:.2g})"


def command(options: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """Arguments of ``kvcompile`` that measure all that the tables need; ``others`` go before the defaults here."""
    given = {item.partition("=")[0] for item in others}
    more = [part for name, value in DEFAULTS.items() if name not in given for part in (name, value)]
    schemes = [] if "--schemes" in given else ["--schemes", ",".join(SCHEMES)]
    return ["eval", options.model, *schemes, *more, "--no-attention", "--telemetry", "--out", str(options.out), *others]


def main() -> int:
    """Measure, or read, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="tinylm-16k")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="a new folder: measure into it")
    where.add_argument("--read", type=Path, help="the folder of a run")
    options, others = parser.parse_known_args()
    if options.out is not None:
        failed = kvcompile_main(command(options, others))
        if failed:
            return failed
    console = Console(width=190)
    for table in tables(Run(Results.load((options.out or options.read) / "results.json"))):
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
