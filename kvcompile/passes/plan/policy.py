"""Policy: which schemes the keys and values of each attention get. Pure.

A policy is one scheme, a pair for keys and values, or globs over module paths; the longest matching glob wins. None in place of a scheme
leaves the attentions of these paths as they are.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvcompile.errors import BadPolicy, LayerByNumber, UnknownHalf
from kvcompile.schemes import Certify, Scheme, parse


@dataclass(frozen=True)
class Pair:
    """Separate schemes for keys and values; ``certify``: what their attention reports of its error is held against, None for no report."""

    k: Scheme
    v: Scheme
    certify: Certify | None = None

    def spec(self) -> str:
        """The pair as text, part of cache keys."""
        return f"{self.k.spec()}|{self.v.spec()}" + (f"|{self.certify.spec()}" if self.certify is not None else "")


@dataclass(frozen=True)
class Policy:
    """Scheme pairs by module-path glob, in the order of their writing; ``*`` is the default. A pair of None: not rewritten."""

    rules: tuple[tuple[str, Pair | None], ...]

    @property
    def pairs(self) -> tuple[tuple[str, Pair], ...]:
        """The rules that choose schemes."""
        return tuple((glob, pair) for glob, pair in self.rules if pair is not None)

    def of(self, path: str) -> Pair | None:
        """The pair for a module path: the longest matching glob wins; None where that leaves it out, or where no glob matches."""
        rule = self._rule(path)
        return rule[1] if rule is not None else None

    def leaves_out(self, path: str) -> bool:
        """Whether the longest glob that matches a module path says that it is not rewritten."""
        rule = self._rule(path)
        return rule is not None and rule[1] is None

    def unmatched(self, paths: Collection[str]) -> tuple[str, ...]:
        """The globs that match none of these module paths, but for a default."""
        return tuple(glob for glob, _ in self.rules if glob != "*" and not any(fnmatch.fnmatch(path, glob) for path in paths))

    def _rule(self, path: str) -> tuple[str, Pair | None] | None:
        hits = [(len(glob.replace("*", "")), (glob, pair)) for glob, pair in self.rules if fnmatch.fnmatch(path, glob)]
        return max(hits, key=lambda hit: hit[0])[1] if hits else None

    def spec(self) -> str:
        """The policy as text, part of cache keys."""
        return ";".join(f"{glob}=>{pair.spec() if pair is not None else None}" for glob, pair in self.rules)


KEY_AND_VALUE = {"k", "v"}
"""What a mapping for one attention has to name."""
LIKE_KEY_AND_VALUE = ("key", "keys", "value", "values", "k_cache", "v_cache", "key_cache", "value_cache")
"""Names that people give to halves."""


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
    if isinstance(choice, Mapping) and all(isinstance(name, str) for name in choice) and _names_halves(choice):
        wrong = next((name for name in choice if name not in KEY_AND_VALUE), None)
        raise UnknownHalf(found=sorted(choice), hint="" if wrong is None else f"; did you mean {wrong.strip().lower()[:1]!r}?")
    raise BadPolicy(found=choice)


def _names_halves(choice: Mapping[object, object]) -> bool:
    """Whether a mapping was meant to name keys and values of one attention, rather than module paths."""
    names = [str(name).strip().lower() for name in choice]
    return bool(names) and all(name in KEY_AND_VALUE or difflib.get_close_matches(name, LIKE_KEY_AND_VALUE, 1, 0.75) for name in names)


def policy_of(choice: object) -> Policy:
    """A policy from whatever ``backend(scheme=...)`` was given; raises a SchemeError."""
    if isinstance(choice, Policy):
        return choice
    if isinstance(choice, Mapping) and set(choice) != KEY_AND_VALUE and not (choice and _names_halves(choice)):
        if not choice:
            raise BadPolicy(found=choice)
        for glob in choice:
            if not isinstance(glob, str):
                raise LayerByNumber(found=glob)
        return Policy(tuple((glob, None if item is None else pair_of(item)) for glob, item in choice.items()))
    return Policy((("*", pair_of(choice)),))
