"""All laws, and ``conformance``, which tries them on one scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcompile.errors import LawBroken, NotConforming
from kvcompile.schemes import Scheme
from kvcompile.testing import attention, caches, compiled, expressions, numerics, storage, words
from kvcompile.testing.laws import Law, LeftOut, known

ROOMS = (words, numerics, storage, expressions, attention, caches, compiled)
LAWS = tuple(item for room in ROOMS for item in vars(room).values() if isinstance(item, Law))
"""All laws; a law comes after the laws that it relies on."""
COMPILED = frozenset(item for item in vars(compiled).values() if isinstance(item, Law))
"""Laws that run a compiler for some ten seconds."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one law on one scheme: the number of settings tried, the first violation or None, and why it was left out, if it was."""

    law: Law
    tried: int
    broken: LawBroken | None = None
    left_out: str = ""


def outcomes(scheme: type[Scheme], laws: Sequence[Law] = LAWS) -> Iterator[Outcome]:
    """Yield the outcome of each of ``laws`` on a scheme's class; a law ends with the first setting that breaks it."""
    with known(scheme):
        for law in laws:
            yield _outcome(law, scheme)


def _outcome(law: Law, scheme: type[Scheme]) -> Outcome:
    tried = 0
    try:
        for made in law.settings(scheme):
            tried += 1
            law(made)
    except LawBroken as broken:
        return Outcome(law, tried, broken)
    except LeftOut as why:
        return Outcome(law, tried - 1, left_out=str(why))
    return Outcome(law, tried)


def conformance(scheme: type[Scheme], *, compile: bool = True) -> tuple[Outcome, ...]:  # noqa: A002 - as users say it
    """Try every law on a scheme's class and return the outcome of each; raises NotConforming, an AssertionError, if any is broken.

    ``compile``: also try the laws that run Inductor and a C++ compiler. The class need not be registered. Compiled code of this process is
    dropped.
    """
    laws = [law for law in LAWS if compile or law not in COMPILED]
    found = tuple(outcomes(scheme, laws))
    broken = [outcome.broken for outcome in found if outcome.broken is not None]
    if broken:
        raise NotConforming(scheme=scheme.name, count=len(broken), tried=len(laws), broken="\n".join(f"* {item}" for item in broken))
    return found
