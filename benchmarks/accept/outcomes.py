"""Outcomes: what can come of a case, and the frozen record of it that is printed, saved and compared."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any


class Outcome(enum.Enum):
    """What came of one case."""

    RIGHT = "right"
    REFUSED = "refused"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"
    REFUSED_WRONGLY = "refused wrongly"
    RECOMPILES = "recompiles"
    WRONG = "wrong"
    CRASHED = "crashed"
    TIMEOUT = "timeout"

    @property
    def failed(self) -> bool:
        """Return whether the outcome makes the run fail; a refusal that docs/SUPPORT.md announces does not, nor what nobody can tell."""
        return self in {Outcome.REFUSED_WRONGLY, Outcome.RECOMPILES, Outcome.WRONG, Outcome.CRASHED, Outcome.TIMEOUT}


@dataclass(frozen=True)
class Result:
    """One case's outcome with the numbers behind it.

    ``error``, ``tolerance``: at the worst step, relative to the norm of the reference's logits. ``eager``: the same error of
    the uncompiled model in the case's dtype. ``control``: how far the scheme's rounding moves the logits without a compiler.
    ``graphs``, ``stock``: graphs compiled over both requests by this backend and by stock torch.compile.
    ``spent``: seconds by phase (build, ours, references, stock) of the case's ``seconds``. ``trace``: where a crash
    came from, as Python prints it.
    """

    id: str
    outcome: Outcome
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    step: str = ""
    eager: float | None = None
    control: float | None = None
    sites: int = 0
    refused: tuple[str, ...] = ()
    graphs: int = 0
    stock: int | None = None
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    trace: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {**asdict(self), "outcome": self.outcome.value, "refused": list(self.refused)}
