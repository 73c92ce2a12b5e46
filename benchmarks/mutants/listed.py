"""The list: each mutant's place and change, and the test that notices it, as a CSV file.

``mutants.csv`` is what was run of ``--draw 38``, in its numbers (not all of kernels: their tests interpret Triton), with survivors of an
earlier source's draw from 150 on. A mutant whose line has since changed stands in the new line.
"""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).parent / "mutants.csv"


@dataclass(frozen=True)
class Mutant:
    """One change: in the ``nth`` line of ``file`` that reads ``old``, counted from 0; ``scope`` is the function around it.

    ``killer``: the identifier of the test that fails; empty where none does. ``note``: why none can, where the change means the same.
    """

    number: int
    room: str
    file: str
    scope: str
    nth: int
    old: str
    new: str
    killer: str = ""
    note: str = ""

    def applied(self, source: str) -> str:
        """Return the source with the change; raises ValueError where its line is not there."""
        lines = source.splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.rstrip("\n") == self.old]
        if len(places) <= self.nth:
            raise ValueError(f"mutant {self.number}: {self.file} has no line {self.old.strip()!r} number {self.nth}")
        lines[places[self.nth]] = self.new + "\n"
        return "".join(lines)


def read(path: Path = FILE) -> list[Mutant]:
    """Read the list."""
    with path.open(newline="") as file:
        return [Mutant(**{**row, "number": int(row["number"]), "nth": int(row["nth"])}) for row in csv.DictReader(file)]  # type: ignore[arg-type]


def write(mutants: list[Mutant], path: Path = FILE) -> None:
    """Write the list."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Mutant)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(mutant) for mutant in sorted(mutants, key=lambda mutant: mutant.number))
