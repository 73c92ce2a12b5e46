"""Schemes of keys and of values in one text: ``int8``, or ``k=int8,v=int4(group=16)`` in either order."""

from __future__ import annotations

import re

from kvcompile.errors import UnknownKeyOrValue
from kvcompile.schemes.base import Scheme
from kvcompile.schemes.registry import parse

APART = re.compile(r"\s*\w+\s*=")
"""The beginning of a text that names a scheme for keys and one for values."""
COMMA = re.compile(r",(?![^()]*\))")
"""A comma outside of a scheme's options."""
NAMED_PAIRS = {"k8v4": "k=int8,v=int4", "k4v2": "k=kivi(bits=4),v=kivi(bits=2)"}
"""Pairs by the names that the literature uses, bits of keys and then of values: keys lose more to few bits than values do."""


def parse_pair(text: str) -> tuple[Scheme, Scheme]:
    """Return the schemes of keys and of values of a scheme's text, of ``k=SCHEME,v=SCHEME``, or of a name of ``NAMED_PAIRS``.

    Raises a SchemeError otherwise. It is an UnknownKeyOrValue for parts other than k and v.
    """
    text = NAMED_PAIRS.get(text.strip().lower(), text)
    if not APART.match(text):
        scheme = parse(text)
        return scheme, scheme
    halves = [part.partition("=") for part in COMMA.split(text)]
    names = [name.strip() for name, _, _ in halves]
    if sorted(names) != ["k", "v"]:
        wrong = next((name for name in names if name not in {"k", "v"}), None)
        raise UnknownKeyOrValue(found=names, hint="" if not wrong else f"; did you mean {wrong[:1].lower()!r}?")
    given = {name.strip(): parse(scheme.strip()) for name, _, scheme in halves}
    return given["k"], given["v"]
