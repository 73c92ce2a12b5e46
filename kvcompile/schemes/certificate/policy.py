"""Certify: the largest errors that a certificate may show, and the consequences of larger errors.

The policy of the paper's table 2, and its hard budgets. It is data of the compiled graph; the graph never branches on it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from kvcompile.schemes.base import require

NAME = "certify"

DEFAULTS = "default"
"""Text of the paper's policy."""


class Fallback(enum.Enum):
    """The consequence of a failed check for a head: DENSE computes it again from full-precision tokens, REPORT only counts the failure."""

    DENSE = "dense"
    REPORT = "report"


class Select(enum.Enum):
    """The blocks that a query head promotes: its own selection, or the union of the selections of all query heads of its kv head."""

    HEAD = "head"
    GROUP = "group"


def _number(value: object, low: float, high: float) -> bool:
    """Return whether ``value`` is a real number, not a bool, in [low, high]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclasses.dataclass(frozen=True)
class Certify:
    """Promotion, budgets and checks of certified attention; the default numbers are the paper's.

        ``tau_cov``       promote blocks to full-precision keys until they hold this share of the estimated mass
        ``k_min, k_max``  smallest and largest number of promoted blocks
        ``widen``         how often ``k_max`` may double (rung 1), to make ``tau_cov`` certain and to meet ``key_budget``
        ``certain``       whether rung 1 must make ``tau_cov`` hold for the exact mass, whatever the errors of the codes
        ``key_budget``    largest key bound; ``inf`` for none
        ``v_tol``         read full-precision values of blocks that may add more than this to the value bound (rung 2); ``inf`` for none
        ``value_budget``  largest value bound; met by promoting further blocks, the largest first; ``inf`` for none
        ``rank``          how many leading blocks must be certain (rung 3); 0 turns the check off
        ``agree``         whether codes must also order these blocks as full-precision keys do: the paper asks it, exactness does not
        ``guard``         by how much a logit may exceed its bound before the planes count as damaged (rung 4)
        ``explore``       share of the other blocks to compare with their full-precision tokens at every step
        ``select``        "head": each query head selects blocks for itself; "group": all query heads of a kv head use the union
        ``fallback``      "dense": compute a failing head from full-precision tokens; "report": only count it
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
            require(fine, NAME, option, f"a whole number from {low} to {high}", value, "the paper has k_min=2, k_max=128, rank=1")
        for option, limit in real.items():
            value = getattr(self, option)
            require(_number(value, 0.0, limit), NAME, option, f"a number from 0 to {limit}", value, "leave it out for the paper's setting")
        for option in ("certain", "agree"):
            value = getattr(self, option)
            require(isinstance(value, bool), NAME, option, "True or False", value, "leave it out for the default")
        require(isinstance(self.fallback, Fallback), NAME, "fallback", "'dense' or 'report'", self.fallback, "'dense' keeps the contract")
        require(isinstance(self.select, Select), NAME, "select", "'head' or 'group'", self.select, "'head' reads the fewest blocks")

    @property
    def widens_coverage(self) -> bool:
        """Whether rung 1 promotes further blocks until promoted blocks surely hold the share ``tau_cov`` of the exact mass."""
        return self.certain and self.widen > 0 and 0 < self.tau_cov < 1

    def spec(self) -> str:
        """Return the options that differ from their defaults, as text that ``parse_policy`` reads back; an operand of attention."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        changed = (f"{field.name}:{getattr(value, 'value', value)}" for field, value in values if value != field.default)
        return "/".join(changed) or DEFAULTS


_TRUTH = {"True": True, "False": False}


def parse_policy(text: str) -> Certify:
    """Return the policy for text as ``Certify.spec`` writes it, e.g. ``v_tol:0.02/rank:0``. Raises BadOption."""
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
    """Columns of a step's certificate, float32 [B, H, S, figures]; bounds are rounded up."""

    CANDIDATE_KEY = 0
    CANDIDATE_VALUE = 1
    CANDIDATE_ARITHMETIC = 2
    KEY = 3
    """Bound of the returned result, zero if that is dense; the sum of KEY, VALUE and ARITHMETIC bounds the distance to the exact result."""
    VALUE = 4
    ARITHMETIC = 5
    DELTA = 6
    """The largest deviation of a logit over all blocks of codes."""
    TAIL = 7
    """The mass, by int8 scores alone, of the blocks whose keys stayed codes: the paper's estimated tail mass."""


class Count(enum.IntEnum):
    """Columns of a step's counters, int32 [B, H, S, counts]."""

    BLOCKS = 0
    """Visible blocks of codes."""
    KEYS = 1
    VALUES = 2
    EXPLORED = 3
    WIDENED = 4
    """1 if rung 1 promoted more blocks than the coverage needed, else 0."""
    RUNG = 5
    CAUSES = 6


class Rung(enum.IntEnum):
    """The last stage of recovery that a head needed, numbered as in the paper."""

    PLAIN = 0
    WIDENED = 1
    VALUES = 2
    HEAD = 3
    """This head is computed from full-precision tokens."""
    LAYER = 4
    """All heads of this batch row are computed from full-precision tokens."""


class Cause(enum.IntFlag):
    """The reasons why a head failed its checks, as bits of ``Count.CAUSES``."""

    RANK = 1
    BOUNDARY = 2
    BUDGET = 4
    NOT_FINITE = 8
    DAMAGED = 16


EXACT = Certify(tau_cov=1.0, k_min=2**31, k_max=2**31, v_tol=0.0, value_budget=0.0)
"""Reads every block from its full-precision tokens."""

NAIVE = Certify(tau_cov=0.0, k_min=0, k_max=0, widen=0, certain=False, v_tol=math.inf, rank=0, fallback=Fallback.REPORT)
"""Codes alone with all checks off: the paper's naive baseline."""
