"""Figures: the measured damage and speed of schemes that recommendations rest on, with the run that each comes from."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.errors import SchemeError
from kvcompile.report import short_scheme
from kvcompile.schemes import Scheme, parse

FILE = Path(__file__).with_name("figures.json")
"""Written by ``benchmarks/plan_figures.py`` from runs of ``kvcompile eval`` and ``benchmarks/attention.py``."""


@dataclass(frozen=True)
class Damage:
    """The harm that one scheme did to tinylm: the largest KL, in nats a byte, of the runs at most as long as the context asked for.

    ``noise``: that of ``dense`` in these runs, which is rounding alone. Counts, ``of_dense`` (its answers), ``model`` and ``command`` are
    those of the longest such run; ``beyond``: whether the context asked for is longer than any.
    """

    kl: float
    noise: float
    same: int
    predictions: int
    answers: int
    of_dense: int
    questions: int
    measured: int
    beyond: bool
    model: str
    command: str


@dataclass(frozen=True)
class Speed:
    """Milliseconds of one layer's attention for one new token, by a scheme and dense, where it was measured next to what is asked."""

    ms: float
    dense_ms: float
    batch: int
    tokens: int
    device: str
    file: str


@dataclass(frozen=True)
class Figures:
    """All figures: quality runs from short to long, of one length from few to many questions, and one run of attention."""

    quality: tuple[dict[str, Any], ...]
    speed: dict[str, Any]

    @property
    def labels(self) -> tuple[str, ...]:
        """The schemes whose damage was measured, as a user writes them."""
        return tuple(dict.fromkeys(label for run in self.quality for label in run["rows"]))

    def damage(self, label: str, context: int) -> Damage | None:
        """The damage of a scheme at a context, None where it was not measured."""
        runs = [run for run in self.quality if label in run["rows"]]
        if not runs:
            return None
        short = [run for run in runs if run["context"] <= context] or runs[:1]
        last = short[-1]
        row, dense = last["rows"][label], last["rows"]["dense"]
        # Rounding puts the KL of a scheme that changes nothing on either side of zero.
        worst, noise = (max(0.0, *(run["rows"][name]["kl"] for run in short)) for name in (label, "dense"))
        return Damage(
            worst, noise, row["same"], row["predictions"], row["answers"], dense["answers"], row["questions"], last["context"],
            context > runs[-1]["context"], last["model"], last["command"],
        )

    def timed(self, label: str, batch: int, context: int) -> Speed | None:
        """The time of a scheme's attention beside dense, at the measured number of tokens in all rows that is nearest."""
        rows = {(row["batch"], row["tokens"]): row["ms"] for row in self.speed["rows"] if _label(row["scheme"]) == label}
        dense = {(row["batch"], row["tokens"]): row["ms"] for row in self.speed["rows"] if row["scheme"] == "dense"}
        both = sorted(rows.keys() & dense.keys(), key=lambda at: abs(math.log(at[0] * at[1] / (batch * context))))
        if not both:
            return None
        at = both[0]
        return Speed(rows[at], dense[at], *at, self.speed["device"], self.speed["file"])


@functools.cache
def figures() -> Figures:
    """The figures that the package ships."""
    read = json.loads(FILE.read_text())
    return Figures(tuple(read["quality"]), read["speed"])


@functools.cache
def _label(spelled: str) -> str:
    """A scheme's short form; text that names none of the package's, as it is."""
    try:
        return short_scheme(parse(spelled))
    except SchemeError:
        return spelled


def label_of(scheme: Scheme) -> str:
    """The form under which a scheme's figures are kept."""
    return short_scheme(scheme)
