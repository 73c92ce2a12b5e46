"""The registry: schemes by name. Those of extensions and of other packages are imported when first asked for.

A scheme joins in one of three ways: by a line in ``PLACES``; by ``register`` when its module is imported; or, from an installed package, by
an entry point of the group ``kvcompile.schemes`` whose name is the scheme's::

    [project.entry-points."kvcompile.schemes"]
    ternary = "my_package.ternary:Ternary"
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch

from kvcompile.errors import BadOption, BadScheme, UnknownOption, UnknownScheme
from kvcompile.files.pickled import admit
from kvcompile.schemes.base import Scheme
from kvcompile.spelling import did_you_mean

log = logging.getLogger(__name__)

PLACES = {
    "dense": "kvcompile.schemes.dense:Dense",
    "int8": "kvcompile.schemes.symmetric:Int8",
    "int4": "kvcompile.schemes.symmetric:Int4",
    "nf4": "kvcompile.schemes.nf4:Nf4",
    "gauss": "kvcompile.schemes.gauss:Gauss",
    "fp8": "kvcompile.schemes.symmetric:Fp8",
    "kivi": "kvcompile.schemes.asymmetric:Kivi",
    "normed": "kvcompile.extensions.squat.normed:Normed",
    "squat": "kvcompile.extensions.squat.scheme:Squat",
    "certified": "kvcompile.extensions.certified.scheme:Certified",
    "smartkv": "kvcompile.extensions.smartkv.scheme:Smartkv",
    "beyond": "kvcompile.extensions.beyond.scheme:Beyond",
    "int8-static": "kvcompile.extensions.static_scales.scheme:StaticInt8",
    "fp8-static": "kvcompile.extensions.static_scales.scheme:StaticFp8",
}
"""Module and class of every scheme of this package, in listing order."""

GROUP = "kvcompile.schemes"
"""Group of entry points for schemes of other packages."""


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of other packages' schemes by name, without those that have the name of a scheme of kvcompile.

    Logs a warning for each that is left out.
    """
    found = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name in PLACES:
            log.warning("the entry point %r of the group %r is left out: a scheme of kvcompile has its name", point.value, GROUP)
            continue
        found[point.name] = point
    return found


def _checked(scheme: object) -> type[Scheme]:
    """Return ``scheme`` if it is a scheme class. Raises BadScheme if not."""
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme) and dataclasses.is_dataclass(scheme)):
        raise BadScheme(expected="a frozen dataclass that derives from kvcompile.Scheme", found=scheme)
    scheme()
    return scheme


def _from_entry_point(point: importlib.metadata.EntryPoint) -> type[Scheme]:
    """Return the scheme class of an entry point. Raises BadScheme if importing it fails or its name differs from the entry point's."""
    try:
        scheme = _checked(point.load())
    except BadScheme:
        raise
    except Exception as error:
        raise BadScheme(
            expected=f"the entry point {point.name!r} of the group {GROUP!r} to import",
            found=f"{point.value}: {type(error).__name__}: {error}",
        ) from error
    if scheme.name != point.name:
        raise BadScheme(expected=f"the entry point {point.value!r} to have the name of its scheme, {scheme.name!r}", found=repr(point.name))
    admit(scheme)
    return scheme


class Registry(MutableMapping[str, type[Scheme]]):
    """Scheme classes by name. A look-up imports the class if needed; listing names imports nothing."""

    def __init__(self) -> None:
        self.found: dict[str, type[Scheme]] = {}

    def __getitem__(self, name: str) -> type[Scheme]:
        if name in self.found:
            return self.found[name]
        if name in PLACES:
            module, _, kind = PLACES[name].partition(":")
            self.found[name] = getattr(importlib.import_module(module), kind)
        elif name in _entry_points():
            self.found[name] = _from_entry_point(_entry_points()[name])
        return self.found[name]

    def __setitem__(self, name: str, scheme: type[Scheme]) -> None:
        self.found[name] = scheme

    def __delitem__(self, name: str) -> None:
        del self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*PLACES, *_entry_points(), *self.found)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self.found or name in PLACES or name in _entry_points()


BY_NAME = Registry()
"""All schemes by name."""

Kind = TypeVar("Kind", bound=type[Scheme])


def register(scheme: Kind) -> Kind:
    """Add a scheme class of another package under its name and return it; a decorator.

    Raises BadScheme unless it is a dataclass that derives from ``Scheme`` and its name is not one of kvcompile's own.

    Its source file is part of the keys of compiled code on disk, so an edit recompiles. Registering a name again, as a notebook does,
    replaces the first class.
    """
    _checked(scheme)
    if scheme.name in PLACES or _setting(scheme.name) is not None:
        raise BadScheme(expected="a name that no scheme of kvcompile has", found=repr(scheme.name))
    BY_NAME[scheme.name] = scheme
    admit(scheme)
    parse.cache_clear()
    return scheme


def packaged() -> tuple[type[Scheme], ...]:
    """Return all schemes of this package, in the order of ``PLACES``; imports them."""
    return tuple(BY_NAME[name] for name in PLACES)


def registered() -> tuple[type[Scheme], ...]:
    """Return all schemes, this package's first; imports them. Entry points that fail to import are left out with a warning."""
    found = list(packaged())
    for name in BY_NAME:
        if name in PLACES:
            continue
        try:
            found.append(BY_NAME[name])
        except BadScheme as error:
            log.warning("%s", error)
    return tuple(found)


def loaded() -> tuple[type[Scheme], ...]:
    """Return the schemes imported or registered so far; every scheme of a compiled graph is among them."""
    return tuple(BY_NAME.found.values())


def settings() -> Mapping[str, tuple[str, dict[str, object]]]:
    """Return the named settings of all schemes (``Scheme.named``), as {name: (scheme's name, options)}; imports all schemes."""
    return {name: (kind.name, options) for kind in registered() for name, options in kind.named().items()}


def _setting(name: str) -> tuple[str, dict[str, object]] | None:
    """Return (scheme's name, options) of the setting called ``name`` (``Scheme.named``); None if no scheme has one of this name.

    A scheme is imported only if ``name`` begins with the scheme's name and a hyphen.
    """
    for known in BY_NAME:
        if name.startswith(f"{known}-") and (options := BY_NAME[known].named().get(name)) is not None:
            return known, options
    return None


def _option(scheme: type[Scheme], name: str, text: object) -> object:
    """Return an option's value, converted from text by the type of the field's default. Raises UnknownOption or BadOption."""
    known = {field.name: field for field in scheme.options()}
    if name not in known:
        raise UnknownOption(scheme=scheme.name, known=sorted(known), option=name)
    default: Any = known[name].default
    if not isinstance(text, str):
        return text
    try:
        if (kind := known[name].metadata.get("optional")) is not None:
            return None if text == "None" else kind(text)
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
            scheme=scheme.name, option=name, expected=_spellings(default), found=text, todo="correct the value"
        ) from error


def _spellings(default: object) -> str:
    """Return a text with the allowed values of an option, from its default: all values of an enum, "True or False", else an example."""
    if isinstance(default, enum.Enum):
        return "one of " + ", ".join(str(item.value) for item in type(default))
    return "True or False" if isinstance(default, bool) else f"like {default}"


def make(name: str, **options: object) -> Scheme:
    """Return a scheme by name with options. Raises UnknownScheme, UnknownOption, BadOption, or BadScheme for a bad entry point."""
    if name in BY_NAME:
        cls = BY_NAME[name]
        return cls(**{key: _option(cls, key, value) for key, value in cls.written_before(options).items()})
    setting = _setting(name)
    if setting is not None:
        base, given = setting
        return make(base, **{**given, **options})
    names = [*BY_NAME, *settings()]
    raise UnknownScheme(known=names, name=name, hint=did_you_mean(name, names))


@functools.cache
def parse(text: str) -> Scheme:
    """Return the scheme for text such as ``int4`` or ``int4(group=64)``, as ``Scheme.spec`` writes it.

    Raises a SchemeError for other text. It is an UnknownScheme for a name that is not registered.
    """
    name, opened, rest = text.strip().partition("(")
    if opened and not rest.endswith(")"):
        raise UnknownScheme(known=list(BY_NAME), name=text, hint="; options end with ')'")
    options = {}
    for item in filter(None, rest.removesuffix(")").split(",")):
        key, _, value = item.partition("=")
        options[key.strip()] = value.strip()
    return make(name.strip(), **options)
