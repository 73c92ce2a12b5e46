"""The schemes, in one ordered literal; adding one to the package is a file and a line here, adding one from outside is ``register``."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from typing import Any, TypeVar

import torch

from kvcompile.errors import BadOption, BadScheme, UnknownOption, UnknownScheme
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.certified.scheme import Certified
from kvcompile.extensions.smartkv.scheme import Smartkv
from kvcompile.extensions.squat.normed import Normed
from kvcompile.extensions.squat.scheme import LONGBENCH, Squat
from kvcompile.extensions.static_scales.scheme import StaticFp8, StaticInt8
from kvcompile.schemes.adaptive import Adaptive, Churn, Due, Look, Stored, StoredTokens
from kvcompile.schemes.asymmetric import Kivi
from kvcompile.schemes.base import AMAX, SPREAD, Planes, Scheme
from kvcompile.schemes.certificate.policy import Certify
from kvcompile.schemes.dense import Dense
from kvcompile.schemes.nf4 import Nf4
from kvcompile.schemes.pickled import admit
from kvcompile.schemes.symmetric import Fp8, Int4, Int8

SCHEMES: tuple[type[Scheme], ...] = (
    Dense,
    Int8,
    Int4,
    Nf4,
    Fp8,
    Kivi,
    Normed,
    Squat,
    Certified,
    Smartkv,
    Beyond,
    StaticInt8,
    StaticFp8,
)

BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
admit(*SCHEMES)


def _changes(scheme: Scheme) -> dict[str, object]:
    """The options of a scheme that are not its defaults."""
    return {field.name: value for field in scheme.options() if (value := getattr(scheme, field.name)) != field.default}


SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "squat-pre": ("squat", {"pre_rope": True}),
    "squat-paper": ("squat", _changes(Squat.paper())),
    "squat-pre-paper": ("squat", _changes(Squat.paper(pre_rope=True))),
    **{
        f"squat{'-pre' if before else ''}-longbench-{model}": ("squat", _changes(Squat.longbench(model, before)))
        for model, before in LONGBENCH
    },
}
"""Names of settings that a source gives a name of its own: SQuat's with keys before RoPE, and what it ran its tables with."""


Kind = TypeVar("Kind", bound=type[Scheme])


def register(scheme: Kind) -> Kind:
    """Add a scheme of another package by its name; a decorator. Raises BadScheme.

    What was compiled for it is kept on disk under its source file too: after an edit it is compiled anew. Registering the
    class of a name again, as a notebook does, takes the place of the first.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme) and dataclasses.is_dataclass(scheme)):
        raise BadScheme(expected="a frozen dataclass that derives from kvcompile.Scheme", found=scheme)
    if scheme.name in SETTINGS or any(known.name == scheme.name for known in SCHEMES):
        raise BadScheme(expected="a name that no scheme of kvcompile has", found=repr(scheme.name))
    scheme()
    BY_NAME[scheme.name] = scheme
    admit(scheme)
    parse.cache_clear()
    return scheme


def registered() -> tuple[type[Scheme], ...]:
    """All schemes, those of the package first."""
    return tuple(BY_NAME.values())


def _option(scheme: type[Scheme], name: str, text: object) -> object:
    """One option's value from text, by the type of the field's default."""
    known = {field.name: field for field in scheme.options()}
    if name not in known:
        raise UnknownOption(scheme=scheme.name, known=sorted(known), option=name)
    default: Any = known[name].default
    if not isinstance(text, str):
        return text
    try:
        if isinstance(default, enum.Enum):
            return type(default)(text)
        if isinstance(default, torch.dtype):
            value = getattr(torch, text)
            if not isinstance(value, torch.dtype):
                raise ValueError(text)
            return value
        if isinstance(default, bool):
            return {"True": True, "False": False}[text]
        return type(default)(text)
    except (ValueError, KeyError, AttributeError) as error:
        raise BadOption(
            scheme=scheme.name, option=name, expected=f"like {default}", found=text, todo="correct the value"
        ) from error


def make(name: str, **options: object) -> Scheme:
    """A scheme by name with options; raises UnknownScheme, UnknownOption or BadOption."""
    if name in SETTINGS:
        base, given = SETTINGS[name]
        return make(base, **{**given, **options})
    if name not in BY_NAME:
        names = [*BY_NAME, *SETTINGS]
        near = difflib.get_close_matches(name, names, n=1)
        raise UnknownScheme(known=names, name=name, hint=f"; did you mean {near[0]!r}?" if near else "")
    cls = BY_NAME[name]
    return cls(**{key: _option(cls, key, value) for key, value in options.items()})


@functools.cache
def parse(text: str) -> Scheme:
    """The scheme that ``Scheme.spell`` wrote, or a plain name: ``int4`` or ``int4(group=64)``."""
    name, opened, rest = text.strip().partition("(")
    if opened and not rest.endswith(")"):
        raise UnknownScheme(known=list(BY_NAME), name=text, hint="; options end with ')'")
    options = {}
    for item in filter(None, rest.removesuffix(")").split(",")):
        key, _, value = item.partition("=")
        options[key.strip()] = value.strip()
    return make(name.strip(), **options)


__all__ = [
    "AMAX", "BY_NAME", "SCHEMES", "SETTINGS", "SPREAD", "Adaptive", "Beyond", "Certified", "Certify", "Churn", "Dense", "Due", "Fp8",
    "Int4", "Int8", "Kivi", "Look", "Nf4", "Normed", "Planes", "Scheme", "Smartkv", "Squat", "StaticFp8", "StaticInt8", "Stored",
    "StoredTokens", "make", "parse", "register", "registered",
]
