"""Records: the outcomes of seeds in a file, one letter each, which several runs and several machines add to."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.features import fingerprint, odd
from benchmarks.fuzz.trial import Found, Result, Way

LETTERS = {
    Found.RIGHT: "R", Found.REFUSED: "-", Found.NOTED: "n", Found.TOLD: "t", Found.OUTSIDE: "o", Found.DIFFERENT: "D", Found.FAULT: "F",
}
BAD = frozenset({Found.DIFFERENT, Found.FAULT})
_BY_LETTER = {letter: found for found, letter in LETTERS.items()}


class OtherRun(ValueError):
    """A file of results of another grammar, inner compiler or device: their seeds mean other programs."""


@dataclass
class Record:
    """What became of seeds: their outcomes, and those that are bad in full; ``seconds`` of wall time and of all processes together."""

    way: Way
    grammar: str = field(default_factory=fingerprint)
    outcomes: dict[int, Found] = field(default_factory=dict)
    bad: dict[int, Result] = field(default_factory=dict)
    seconds: float = 0.0
    process_seconds: float = 0.0

    def add(self, results: Iterable[Result]) -> None:
        """Take results in."""
        for result in results:
            self.outcomes[result.seed] = result.found
            if result.found in BAD:
                self.bad[result.seed] = result

    def counts(self) -> collections.Counter[Found]:
        """Return how many programs had each outcome."""
        return collections.Counter(self.outcomes.values())

    def missing(self, seeds: range) -> list[range]:
        """Return the ranges of these seeds that have no outcome yet."""
        found: list[range] = []
        for seed in seeds:
            if seed in self.outcomes:
                continue
            if found and found[-1].stop == seed:
                found[-1] = range(found[-1].start, seed + 1)
            else:
                found.append(range(seed, seed + 1))
        return found

    def save(self, path: Path) -> None:
        """Write to a file, of which there is an old or a new one at any time."""
        runs = {str(part.start): "".join(LETTERS[self.outcomes[seed]] for seed in part) for part in _ranges(self.outcomes)}
        bad = [{"seed": item.seed, "odd": odd(item.choice), "found": item.found.name, "said": item.said} for item in self.bad.values()]
        made = {
            "grammar": self.grammar, "way": dataclasses.asdict(self.way), "seconds": self.seconds, "process_seconds": self.process_seconds,
            "outcomes": runs, "bad": bad,
        }
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(json.dumps(made))
        part.replace(path)

    def merge(self, path: Path) -> None:
        """Take in a file. Raises OtherRun."""
        read = json.loads(path.read_text())
        mine = (self.grammar, dataclasses.asdict(self.way))
        if (read["grammar"], dataclasses.asdict(Way(**read["way"]))) != mine:
            raise OtherRun(f"expected results of {mine}, found {(read['grammar'], read['way'])} in {path}; choose another file")
        for first, letters in read["outcomes"].items():
            self.outcomes |= {int(first) + at: _BY_LETTER[letter] for at, letter in enumerate(letters)}
        self.bad |= {item["seed"]: Result(item["seed"], item["odd"], Found[item["found"]], item["said"]) for item in read["bad"]}
        self.seconds += read["seconds"]
        self.process_seconds += read["process_seconds"]


def _ranges(seeds: Iterable[int]) -> Iterator[range]:
    start = last = None
    for seed in sorted(seeds):
        if last is None or seed != last + 1:
            if start is not None and last is not None:
                yield range(start, last + 1)
            start = seed
        last = seed
    if start is not None and last is not None:
        yield range(start, last + 1)
