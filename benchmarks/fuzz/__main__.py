"""``python -m benchmarks.fuzz``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fuzz import coverage
from benchmarks.fuzz.choices import drawn
from benchmarks.fuzz.fast import prepare
from benchmarks.fuzz.features import odd
from benchmarks.fuzz.records import BAD, Record
from benchmarks.fuzz.shrinking import kinds
from benchmarks.fuzz.trial import Found, Result, Way, tried
from benchmarks.fuzz.workers import results
from benchmarks.fuzz.writing import written

SAVE_SECONDS = 10.0
"""How long results wait in memory before they are written to the file."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz", description="random programs over a KV cache, compiled and plain")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this long")
    parser.add_argument("--inner", default="eager", choices=("eager", "aot_eager", "inductor"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--unlooked", action="store_true", help="on a CPU, do not look where calls write, as on a GPU")
    parser.add_argument("--json", type=Path, help="add outcomes to this file; seeds that it has are not run again")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="take in files of other runs")
    parser.add_argument("--shrink", type=int, default=20, help="how many failures to make smaller")
    parser.add_argument("--coverage", action="store_true", help="show how often pairs of values were seen; without --json, what seeds hold")
    parser.add_argument("--csv", type=Path, help="with --coverage: one line a pair")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the program of a seed, run it, and stop")
    return parser


def _show(console: Console, result: Result) -> None:
    console.print(f"seed {result.seed}: {result.found.value}: {odd(result.choice)} {result.said}", highlight=False, markup=False)


def _covered(console: Console, record: Record, seeds: range, file: Path | None) -> None:
    seen = coverage.counted(record.outcomes or seeds)
    rewritten = coverage.counted(record.outcomes, lambda found: found is Found.RIGHT)
    per_pair, right = coverage.least(seen), coverage.least(rewritten)
    shown = Table("feature", "feature", "pairs", "seen at least", f"under {coverage.LEAST}")
    for row in sorted(coverage.table(seen), key=lambda row: (row[3], row[0])):
        shown.add_row(*map(str, row))
    console.print(shown)
    console.print(
        f"{len(per_pair)} pairs of {len(record.outcomes) or len(seeds)} programs: the rarest seen {per_pair.min()} times, "
        f"{(per_pair < coverage.LEAST).sum()} under {coverage.LEAST}; {(right > 0).sum()} seen in a program that was rewritten and right"
    )
    if file:
        coverage.write(file, seen, rewritten)


def _run(console: Console, record: Record, options: argparse.Namespace) -> None:
    started = saved = time.monotonic()
    seeds, done = record.missing(range(options.first, options.first + options.count)), 0
    for found in results(seeds, options.jobs, started + options.seconds, record.way):
        record.add(found)
        done += len(found)
        for result in found:
            if result.found in BAD:
                _show(console, result)
        if options.json and time.monotonic() - saved > SAVE_SECONDS:
            record.save(options.json)
            saved = time.monotonic()
    seconds = time.monotonic() - started
    record.seconds += seconds
    record.process_seconds += seconds * options.jobs
    console.print(f"{done} programs in {seconds:.0f} s on {options.jobs} processes: {done / max(seconds, 1e-9):.1f} a second")


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz as the arguments say; 1 where a program is silently different, fails because of us or was not run."""
    options, console = _parser().parse_args(given), Console()
    way = Way(options.inner, options.device, unlooked=options.unlooked)
    prepare()
    if options.show is not None:
        choice = drawn(options.show)
        console.print(written(choice, options.device).source, highlight=False, markup=False)
        _show(console, tried(options.show, choice, way))
        return 0
    record, seeds = Record(way), range(options.first, options.first + options.count)
    for file in [*options.merge, *([options.json] if options.json and options.json.exists() else [])]:
        record.merge(file)
    if not (options.coverage and not options.json):
        _run(console, record, options)
    if options.json:
        record.save(options.json)
    if options.coverage:
        _covered(console, record, seeds, options.csv)
        if not options.json:
            return 0
    console.print({found.value: count for found, count in record.counts().items()})
    for result, same in kinds(list(record.bad.values()), way, options.shrink):
        _show(console, result)
        console.print(f"    {len(same)} programs: {same[:20]}")
    return int(bool(record.bad) or bool(record.missing(seeds)))


if __name__ == "__main__":
    sys.exit(main())
