"""``python -m benchmarks.mutants``: is each mutant of the list noticed by its test? With ``--draw`` a new list is made."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from benchmarks.mutants.listed import FILE, ROOT, Mutant, read, write
from benchmarks.mutants.operators import changes
from benchmarks.mutants.rooms import ROOMS
from benchmarks.mutants.run import Ended, Outcome, ended
from benchmarks.mutants.seen import read as read_seen
from benchmarks.mutants.seen import tests_of

SHARE = 0.98
"""Of the mutants that mean something else than the source, how many must be killed."""


def drawn(seed: int) -> list[Mutant]:
    """Draw mutants of every room, at most two of a function, the same for the same seed and source."""
    found: list[Mutant] = []
    for name, room in ROOMS.items():
        every = [
            (str(path.relative_to(ROOT)), change, source)
            for path in sorted({path for glob in room.globs for path in ROOT.glob(glob) if path.suffix in {".py", ".jinja"}})
            for source in [path.read_text()] for change in changes(path.name, source)
        ]
        random.Random(f"{seed} {name}").shuffle(every)
        held: collections.Counter[tuple[str, str]] = collections.Counter()
        for file, change, source in every:
            if sum(mutant.room == name for mutant in found) == room.count:
                break
            held[file, change.scope] += 1
            if held[file, change.scope] <= (2 if change.scope else 6):
                nth = source.splitlines()[: change.line].count(change.old)
                found.append(Mutant(len(found), name, file, change.scope, nth, change.old, change.new))
    return found


def _run(mutants: Iterable[Mutant], options: argparse.Namespace, console: Console) -> list[Ended]:
    """Run mutants side by side, each with its killer, or with the tests of its room where it has none."""
    done: list[Ended] = []
    seen = read_seen(options.seen) if options.seen else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(
                ended, mutant, (mutant.killer,) if mutant.killer else tests_of(mutant, seen, ROOMS[mutant.room].tests), options.seconds,
            )
            for mutant in mutants
        ]
        for number, item in enumerate(as_completed(waiting), 1):
            result = item.result()
            done.append(result)
            said = f"{number}/{len(waiting)} {result.mutant.number} {result.mutant.room}: {result.outcome.value} {result.killer}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)
    return done


def main(given: Sequence[str] | None = None) -> int:
    """Run the list, or draw one and look for tests that notice its mutants; 1 where fewer are killed than must be."""
    parser = argparse.ArgumentParser(description="wrong changes of the package, each noticed by a named test")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one mutant")
    parser.add_argument("--room", choices=list(ROOMS), help="this room's alone")
    parser.add_argument("--only", type=int, nargs="*", help="these numbers alone")
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw a new list, and look for tests that notice it")
    parser.add_argument("--find", action="store_true", help="look for tests that notice the mutants that have none yet")
    parser.add_argument("--seen", type=Path, metavar="FOLDER", help="which tests run which functions, as benchmarks.mutants.seen writes it")
    parser.add_argument("--file", type=Path, default=FILE)
    options, console = parser.parse_args(given), Console()
    if options.draw is None and not options.file.exists():
        console.print(f"no list yet: --draw SEED writes {options.file.name} and looks for the tests that notice it", markup=False)
        return 1
    every = drawn(options.draw) if options.draw is not None else read(options.file)
    finding = options.draw is not None or options.find
    chosen = [
        mutant for mutant in every
        if (options.room in {None, mutant.room}) and (options.only is None or mutant.number in options.only) and not mutant.note
        and not (options.find and mutant.killer)
    ]
    if options.draw is not None:
        write(every, options.file)
    done = _run(chosen, options, console)
    if finding:
        killers = {item.mutant.number: item.killer for item in done if item.outcome is Outcome.KILLED}
        every = [dataclasses.replace(mutant, killer=killers.get(mutant.number, mutant.killer)) for mutant in every]
        write(every, options.file)
    counts = collections.Counter(item.outcome.value for item in done)
    killed = counts[Outcome.KILLED.value]
    console.print(dict(counts), f"{killed} of {len(done)} killed; {sum(bool(mutant.note) for mutant in every)} mean the same as the source")
    return int(killed < SHARE * len(done))


if __name__ == "__main__":
    sys.exit(main())
