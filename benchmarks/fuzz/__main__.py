"""``python -m benchmarks.fuzz``."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz import Found, Result, seeded, shrunk
from benchmarks.fuzz.grammar import AXES

CHUNK = 20
"""Seeds that one process takes at once."""
LIFE = 15
"""Chunks that a process takes before it is replaced."""


def _results(seeds: range, jobs: int, until: float) -> Iterator[list[Result]]:
    """The results of the seeds, chunk by chunk, of chunks begun before ``until``; raises BrokenProcessPool where a process died."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    # A process that has compiled some hundred modules has grown. Processes are replaced all at once: an executor that replaces
    # them one by one (max_tasks_per_child) waits for ever when all have reached their number.
    for start in range(0, len(chunks), jobs * LIFE):
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for done in as_completed([pool.submit(seeded, chunk) for chunk in chunks[start : start + jobs * LIFE]]):
                with contextlib.suppress(CancelledError):
                    yield done.result()
                if time.monotonic() > until:
                    pool.shutdown(wait=False, cancel_futures=True)
        if time.monotonic() > until:
            return


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz as the arguments say; 1 where a module is silently different, fails because of us or was not run."""
    parser = argparse.ArgumentParser(description="random cached attentions, compiled and uncompiled")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="begin no module after this long")
    parser.add_argument("--json", type=Path, help="write counts and failures here")
    options, console, started = parser.parse_args(given), Console(), time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    bad: list[Result] = []
    try:
        for results in _results(range(options.first, options.first + options.count), options.jobs, started + options.limit_seconds):
            counts.update(result.found.value for result in results)
            for result in results:
                if result.found in {Found.DIFFERENT, Found.FAULT}:
                    bad.append(result)
                    _say(console, result)
            if options.json:
                rows = [{"seed": item.seed, "choice": item.choice, "found": item.found.value, "said": item.said} for item in bad]
                options.json.write_text(json.dumps({"counts": counts, "bad": rows}))
    except BrokenProcessPool as died:
        console.print(f"a process died: {died}", markup=False)
    seconds = time.monotonic() - started
    console.print(dict(counts), f"{counts.total()} of {options.count} modules, {seconds:.0f} s on {options.jobs} processes")
    for result in bad:
        _say(console, shrunk(result))
    return int(bool(bad) or counts.total() < options.count)


def _say(console: Console, result: Result) -> None:
    odd = {axis: choice for axis, choice in result.choice.items() if choice != AXES[axis][0]}
    console.print(f"seed {result.seed}: {result.found.value}: {odd} {result.said}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
