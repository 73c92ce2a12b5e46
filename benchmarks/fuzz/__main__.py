"""``python -m benchmarks.fuzz``."""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz import Found, Result, drawn, shrunk, tried
from benchmarks.fuzz.grammar import AXES


def _seeded(seed: int) -> Result:
    return tried(seed, drawn(seed))


def main(given: Sequence[str] | None = None) -> int:
    """Fuzz as the arguments say; 1 where a module is silently different or fails because of us."""
    parser = argparse.ArgumentParser(description="random cached attentions, compiled and uncompiled")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", help="write failures here")
    options, console = parser.parse_args(given), Console()
    counts: collections.Counter[str] = collections.Counter()
    bad: list[Result] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(_seeded, range(options.first, options.first + options.count), chunksize=4):
            counts[result.found.value] += 1
            if result.found in {Found.DIFFERENT, Found.FAULT}:
                bad.append(shrunk(result))
                odd = {axis: choice for axis, choice in bad[-1].choice.items() if choice != AXES[axis][0]}
                console.print(f"seed {result.seed}: {result.found.value}: {odd} {bad[-1].said}", highlight=False, markup=False)
    console.print(dict(counts))
    if options.json:
        rows = [{"seed": item.seed, "choice": item.choice, "found": item.found.value, "said": item.said} for item in bad]
        Path(options.json).write_text(json.dumps(rows))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
