"""Figures: measured damage and speed of schemes, with the run that each comes from; recommendations rest on them."""

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
    """The damage of one scheme to tinylm: the largest KL, in nats per byte, over runs no longer than the requested context.

    ``noise``: the KL of ``dense`` in these runs, which is rounding. ``same``, ``predictions``, ``answers``, ``questions``, ``model``,
    ``command``: figures of the longest such run, whose texts have ``measured`` bytes. ``of_dense``: right answers of ``dense`` in that run.
    ``beyond``: whether the requested context is longer than every run.
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
    """Milliseconds of one layer's attention for one new token, with a scheme and with dense, at the nearest measured size."""

    ms: float
    dense_ms: float
    batch: int
    tokens: int
    device: str
    file: str


@dataclass(frozen=True)
class Figures:
    """All figures: quality runs by length, then by number of questions; and one run of attention."""

    quality: tuple[dict[str, Any], ...]
    speed: dict[str, Any]

    @property
    def labels(self) -> tuple[str, ...]:
        """Schemes whose damage was measured, as a user writes them."""
        return tuple(dict.fromkeys(label for run in self.quality for label in run["rows"]))

    def damage(self, label: str, context: int) -> Damage | None:
        """Return a scheme's damage at a context length, None if it was not measured."""
        runs = [run for run in self.quality if label in run["rows"]]
        if not runs:
            return None
        short = [run for run in runs if run["context"] <= context] or runs[:1]
        last = short[-1]
        row, dense = last["rows"][label], last["rows"]["dense"]
        # Rounding may make the KL of an exact scheme negative.
        worst, noise = (max(0.0, *(run["rows"][name]["kl"] for run in short)) for name in (label, "dense"))
        return Damage(
            worst, noise, row["same"], row["predictions"], row["answers"], dense["answers"], row["questions"], last["context"],
            context > runs[-1]["context"], last["model"], last["command"],
        )

    def timed(self, label: str, batch: int, context: int) -> Speed | None:
        """Return the times of a scheme's attention and of dense attention, as measured nearest to ``batch`` * ``context`` tokens.

        None if none were measured.
        """
        rows = {(row["batch"], row["tokens"]): row["ms"] for row in self.speed["rows"] if _label(row["scheme"]) == label}
        dense = {(row["batch"], row["tokens"]): row["ms"] for row in self.speed["rows"] if row["scheme"] == "dense"}
        both = sorted(rows.keys() & dense.keys(), key=lambda at: abs(math.log(at[0] * at[1] / (batch * context))))
        if not both:
            return None
        at = both[0]
        return Speed(rows[at], dense[at], *at, self.speed["device"], self.speed["file"])


@functools.cache
def figures() -> Figures:
    """Return the measured quality and speed of schemes that the package ships, read from ``figures.json``."""
    read = json.loads(FILE.read_text())
    return Figures(tuple(read["quality"]), read["speed"])


@functools.cache
def _label(spelled: str) -> str:
    """Return a scheme's text without options at their defaults; a text that ``parse`` refuses is returned unchanged."""
    try:
        return short_scheme(parse(spelled))
    except SchemeError:
        return spelled


def label_of(scheme: Scheme) -> str:
    """Return the label under which a scheme's figures are stored."""
    return short_scheme(scheme)
