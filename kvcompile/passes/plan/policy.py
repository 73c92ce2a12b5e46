"""Policy: schemes for the keys and values of each attention. Pure.

A policy is one scheme, a pair for keys and values (a mapping, the text ``k=SCHEME,v=SCHEME``, or a name of ``NAMED_PAIRS``), or a mapping
from globs over module paths; the longest matching glob wins. A scheme of None leaves the attentions of its paths unchanged.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvcompile.errors import BadPolicy, LayerByNumber, UnknownKeyOrValue
from kvcompile.schemes import Certify, Scheme
from kvcompile.schemes.pairs import parse_pair


@dataclass(frozen=True)
class Pair:
    """Schemes for keys and for values; ``certify``: budgets for their attention's error reports, None for no report."""

    k: Scheme
    v: Scheme
    certify: Certify | None = None

    def spec(self) -> str:
        """Return the pair as text, for cache keys."""
        return f"{self.k.spec()}|{self.v.spec()}" + (f"|{self.certify.spec()}" if self.certify is not None else "")


@dataclass(frozen=True)
class Policy:
    """Scheme pairs by glob over module paths, in the order written; ``*`` is the default, a pair of None means not rewritten."""

    rules: tuple[tuple[str, Pair | None], ...]

    @property
    def pairs(self) -> tuple[tuple[str, Pair], ...]:
        """The (glob, pair) rules that store caches in a scheme; rules that leave attentions unchanged are not among them."""
        return tuple((glob, pair) for glob, pair in self.rules if pair is not None)

    def of(self, path: str) -> Pair | None:
        """Return the pair of the longest glob that matches ``path``.

        None if that glob leaves it out, or none matches: both leave the attention unchanged; ``leaves_out`` tells which.
        """
        rule = self._rule(path)
        return rule[1] if rule is not None else None

    def leaves_out(self, path: str) -> bool:
        """Return whether the longest glob that matches ``path`` leaves it out."""
        rule = self._rule(path)
        return rule is not None and rule[1] is None

    def unmatched(self, paths: Collection[str]) -> tuple[str, ...]:
        """Return the globs, except ``*``, that match none of ``paths``."""
        return tuple(glob for glob, _ in self.rules if glob != "*" and not any(fnmatch.fnmatch(path, glob) for path in paths))

    def _rule(self, path: str) -> tuple[str, Pair | None] | None:
        hits = [(len(glob.replace("*", "")), (glob, pair)) for glob, pair in self.rules if fnmatch.fnmatch(path, glob)]
        return max(hits, key=lambda hit: hit[0])[1] if hits else None

    def spec(self) -> str:
        """Return the policy as text, for cache keys."""
        return ";".join(f"{glob}=>{pair.spec() if pair is not None else None}" for glob, pair in self.rules)


KEY_AND_VALUE = {"k", "v"}
"""Required keys of a mapping for one attention."""
LIKE_KEY_AND_VALUE = ("key", "keys", "value", "values", "k_cache", "v_cache", "key_cache", "value_cache")
"""Names that users may write in place of ``k`` and ``v``."""


def pair_of(choice: object) -> Pair:
    """Return a pair for a text (``schemes.pairs``), a Scheme, a Pair, or a mapping with ``k`` and ``v``.

    Raises BadPolicy for another object, UnknownKeyOrValue for a mapping with other keys, and a SchemeError for a text that is not a scheme.
    """
    if isinstance(choice, Pair):
        return choice
    if isinstance(choice, Scheme):
        return Pair(choice, choice)
    if isinstance(choice, str):
        return Pair(*parse_pair(choice))
    if isinstance(choice, Mapping) and set(choice) == {"k", "v"}:
        return Pair(pair_of(choice["k"]).k, pair_of(choice["v"]).v)
    if isinstance(choice, Mapping) and all(isinstance(name, str) for name in choice) and _names_halves(choice):
        wrong = next((name for name in choice if name not in KEY_AND_VALUE), None)
        raise UnknownKeyOrValue(found=sorted(choice), hint="" if wrong is None else f"; did you mean {wrong.strip().lower()[:1]!r}?")
    raise BadPolicy(found=choice)


def _names_halves(choice: Mapping[object, object]) -> bool:
    """Return whether a mapping's keys look like names for keys and values (such as ``k`` and ``v``) rather than module paths."""
    names = [str(name).strip().lower() for name in choice]
    return bool(names) and all(name in KEY_AND_VALUE or difflib.get_close_matches(name, LIKE_KEY_AND_VALUE, 1, 0.75) for name in names)


def policy_of(choice: object) -> Policy:
    """Return the policy for the argument of ``backend(scheme=...)``.

    Raises BadPolicy for an empty mapping, LayerByNumber for a key that is not a text, and the errors of ``pair_of``.
    """
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
