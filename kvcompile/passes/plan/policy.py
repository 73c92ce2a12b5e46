"""Policy: which schemes the keys and values of each attention get. Pure.

A policy is one scheme, a pair for keys and values, or globs over module paths; the longest matching glob wins.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from kvcompile.errors import BadPolicy
from kvcompile.schemes import Certify, Scheme, parse


@dataclass(frozen=True)
class Pair:
    """Separate schemes for keys and values; ``certify``: what their attention reports of its error is held against, None for no report."""

    k: Scheme
    v: Scheme
    certify: Certify | None = None

    def spell(self) -> str:
        """The pair as text, part of cache keys."""
        return f"{self.k.spell()}|{self.v.spell()}" + (f"|{self.certify.spell()}" if self.certify is not None else "")


@dataclass(frozen=True)
class Policy:
    """Scheme pairs by module-path glob, in the order of their writing; ``*`` is the default."""

    rules: tuple[tuple[str, Pair], ...]

    def of(self, path: str) -> Pair | None:
        """The pair for a module path: the longest matching glob wins; None where no glob matches."""
        hits = [(len(glob.replace("*", "")), pair) for glob, pair in self.rules if fnmatch.fnmatch(path, glob)]
        return max(hits, key=lambda hit: hit[0])[1] if hits else None

    def spell(self) -> str:
        """The policy as text, part of cache keys."""
        return ";".join(f"{glob}=>{pair.spell()}" for glob, pair in self.rules)


def pair_of(choice: object) -> Pair:
    """A pair from a name, a spelled scheme, a Scheme object, or a mapping with ``k`` and ``v``."""
    if isinstance(choice, Pair):
        return choice
    if isinstance(choice, Scheme):
        return Pair(choice, choice)
    if isinstance(choice, str):
        scheme = parse(choice)
        return Pair(scheme, scheme)
    if isinstance(choice, Mapping) and set(choice) == {"k", "v"}:
        return Pair(pair_of(choice["k"]).k, pair_of(choice["v"]).v)
    raise BadPolicy(found=choice)


def policy_of(choice: object) -> Policy:
    """A policy from whatever ``backend(scheme=...)`` was given; raises a SchemeError."""
    if isinstance(choice, Policy):
        return choice
    if isinstance(choice, Mapping) and set(choice) != {"k", "v"}:
        if not choice:
            raise BadPolicy(found=choice)
        return Policy(tuple((str(glob), pair_of(item)) for glob, item in choice.items()))
    return Policy((("*", pair_of(choice)),))
