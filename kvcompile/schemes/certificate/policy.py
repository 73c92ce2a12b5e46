"""Certify: what a certificate may be at most, and what happens where it is more.

The policy of the source's table 2, and its hard budgets. It is data of the compiled graph, never a branch of it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from kvcompile.schemes.base import require

NAME = "certify"

DEFAULTS = "default"
"""The spelling of the source's policy."""


class Fallback(enum.Enum):
    """The fallback of a head whose checks fail: it is computed from the originals, or only reported."""

    DENSE = "dense"
    REPORT = "report"


class Select(enum.Enum):
    """Whose selection of keys to promote holds for a query head: its own, or the union of its kv head's."""

    HEAD = "head"
    GROUP = "group"


def _number(value: object, low: float, high: float) -> bool:
    """Whether a real number, not a bool, lies in [low, high]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclasses.dataclass(frozen=True)
class Certify:
    """Promotion, budgets and checks of certified attention; the numbers are the source's.

    ``tau_cov``       blocks are promoted to original keys until they hold this share of the estimated mass
    ``k_min, k_max``  how many blocks at least and at most
    ``widen``         how often ``k_max`` may be doubled (rung 1): where that makes ``tau_cov`` certain, and for ``key_budget``
    ``certain``       whether rung 1 makes ``tau_cov`` hold of the exact mass too, whatever the codes' errors are
    ``key_budget``    the key bound at most; ``inf`` for none
    ``v_tol``         original values for blocks that might add more than this to the value bound (rung 2); ``inf`` for none
    ``value_budget``  the value bound at most, by promoting further blocks, the largest first; ``inf`` for none
    ``rank``          how many leading blocks must be known for certain (rung 3); 0 turns the check off
    ``agree``         whether codes must also order these as originals do, as the source asks; what is returned is exact there without it
    ``guard``         how far beyond its bound a logit may be before the planes count as damaged (rung 4)
    ``explore``       share of the other blocks that are compared with their originals at every step
    ``select``        "head": every query head selects blocks for itself; "group": those of a kv head get the union of theirs
    ``fallback``      "dense": a head that fails is computed from the originals; "report": it is only counted
    """

    tau_cov: float = 0.995
    k_min: int = 2
    k_max: int = 128
    widen: int = 1
    certain: bool = True
    key_budget: float = math.inf
    v_tol: float = 0.05
    value_budget: float = math.inf
    rank: int = 1
    agree: bool = False
    guard: float = 1e-6
    explore: float = 0.0
    select: Select = Select.HEAD
    fallback: Fallback = Fallback.DENSE

    def __post_init__(self) -> None:
        for option, kind in (("fallback", Fallback), ("select", Select)):
            named: object = getattr(self, option)
            if named in [each.value for each in kind]:
                object.__setattr__(self, option, kind(named))
        most = 2**31
        least_max = self.k_min if isinstance(self.k_min, int) else 0
        whole = (("k_min", 0, most), ("k_max", least_max, most), ("widen", 0, 16), ("rank", 0, 64))
        real = {"tau_cov": 1.0, "explore": 1.0, "guard": math.inf, "key_budget": math.inf, "v_tol": math.inf, "value_budget": math.inf}
        for option, low, high in whole:
            value: object = getattr(self, option)
            fine = isinstance(value, int) and _number(value, low, high)
            require(fine, NAME, option, f"a whole number from {low} to {high}", value, "the source has k_min=2, k_max=128, rank=1")
        for option, limit in real.items():
            value = getattr(self, option)
            require(_number(value, 0.0, limit), NAME, option, f"a number from 0 to {limit}", value, "leave it out for the source's setting")
        for option in ("certain", "agree"):
            value = getattr(self, option)
            require(isinstance(value, bool), NAME, option, "True or False", value, "leave it out for the default")
        require(isinstance(self.fallback, Fallback), NAME, "fallback", "'dense' or 'report'", self.fallback, "'dense' keeps the contract")
        require(isinstance(self.select, Select), NAME, "select", "'head' or 'group'", self.select, "'head' reads the fewest blocks")

    @property
    def widens_coverage(self) -> bool:
        """Whether rung 1 looks at the coverage."""
        return self.certain and self.widen > 0 and 0 < self.tau_cov < 1

    def spec(self) -> str:
        """Return what differs from the defaults, as text that ``parse_policy`` reads back; the operand of the op."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        changed = (f"{field.name}:{getattr(value, 'value', value)}" for field, value in values if value != field.default)
        return "/".join(changed) or DEFAULTS


_TRUTH = {"True": True, "False": False}


def parse_policy(text: str) -> Certify:
    """Parse what ``Certify.spec`` wrote: ``v_tol:0.02/rank:0``; raises BadOption."""
    kinds: dict[str, Any] = {
        field.name: _TRUTH.__getitem__ if isinstance(field.default, bool) else type(field.default) for field in dataclasses.fields(Certify)
    }
    found = {}
    for item in text.split("/") if text != DEFAULTS else ():
        name, _, value = (part.strip() for part in item.partition(":"))
        try:
            found[name] = kinds[name](value)
        except (KeyError, ValueError):
            known = ", ".join(kinds)
            require(False, NAME, repr(name), f"one of {known}, as name:value with '/' between them", item, "leave out what is the default")
    return Certify(**found)


class Figure(enum.IntEnum):
    """The columns of a step's certificate, float32 [B, H, S, figures]; bounds are rounded up."""

    CANDIDATE_KEY = 0
    CANDIDATE_VALUE = 1
    CANDIDATE_ARITHMETIC = 2
    KEY = 3
    """Of what is returned, zero where that is dense; with VALUE and ARITHMETIC it bounds the distance to the exact result."""
    VALUE = 4
    ARITHMETIC = 5
    DELTA = 6
    """The largest deviation of a logit in any block of codes."""
    TAIL = 7
    """The mass that int8 scores alone put on the blocks which kept codes as keys: the source's estimated tail mass."""


class Count(enum.IntEnum):
    """The columns of a step's counters, int32 [B, H, S, counts]."""

    BLOCKS = 0
    """Visible blocks of codes."""
    KEYS = 1
    VALUES = 2
    EXPLORED = 3
    WIDENED = 4
    """Whether rung 1 promoted more blocks than the coverage alone asked for: 0 or 1."""
    RUNG = 5
    CAUSES = 6


class Rung(enum.IntEnum):
    """How far a head went, in the source's numbers."""

    PLAIN = 0
    WIDENED = 1
    VALUES = 2
    HEAD = 3
    """This head is computed from the originals."""
    LAYER = 4
    """All heads of this batch row are."""


class Cause(enum.IntFlag):
    """Why a head failed; bits of ``Count.CAUSES``."""

    RANK = 1
    BOUNDARY = 2
    BUDGET = 4
    NOT_FINITE = 8
    DAMAGED = 16


EXACT = Certify(tau_cov=1.0, k_min=2**31, k_max=2**31, v_tol=0.0, value_budget=0.0)
"""Every block by its originals."""

NAIVE = Certify(tau_cov=0.0, k_min=0, k_max=0, widen=0, certain=False, v_tol=math.inf, rank=0, fallback=Fallback.REPORT)
"""Codes alone with all checks off: the source's naive baseline."""
