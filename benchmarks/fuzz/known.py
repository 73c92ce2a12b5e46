"""Known: programs with what came of them once, so that one that is refused later, or rewritten by mistake, is seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fuzz.features import Choice
from benchmarks.fuzz.trial import Found

FILE = Path(__file__).parent / "known.jsonl"


@dataclass(frozen=True)
class Known:
    """A program by its seed and odd features, and its outcome."""

    seed: int
    choice: Choice
    found: Found


def read(path: Path = FILE) -> list[Known]:
    """Read the programs of a file, one JSON object a line."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [Known(row["seed"], row["choice"], Found[row["found"]]) for row in rows]
