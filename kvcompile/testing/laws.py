"""Law: a property that every scheme must have, tried on one setting, with the error that reports a violation."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch

from kvcompile.errors import BadScheme, LawBroken
from kvcompile.files.pickled import admit
from kvcompile.schemes import BY_NAME, Scheme, parse
from kvcompile.types import Role, SlotSpec


class Over(enum.Enum):
    """The settings of a scheme that a law is tried on."""

    DEFAULT = "the default"
    CACHES = "the default, and the first variant with a window if the default has none"
    SETTINGS = "every variant, as keys and as values"
    BOUNDED = "every variant that announces a bound"


class Unlike(Exception):
    """Raised inside of a law's function if the law does not hold; ``Law`` raises it again as ``LawBroken``."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


class LeftOut(Exception):
    """Raised inside of a law's function if this machine cannot try the law; the text says why."""


def unlike(expected: str, found: object) -> NoReturn:
    """Raise Unlike with the value that a law expects and the value that it found."""
    raise Unlike(expected, found)


@dataclass(frozen=True)
class Law:
    """A law: its name, its settings (``over``), the remedy for a violation (``todo``), and the function ``body`` that tries one setting."""

    name: str
    over: Over
    todo: str
    body: Callable[[Scheme], None]

    def settings(self, scheme: type[Scheme]) -> tuple[Scheme, ...]:
        """Return the settings of a scheme's class that the law is tried on."""
        if self.over is Over.DEFAULT:
            return (scheme(),)
        found = settings_of(scheme)
        if self.over is Over.CACHES:
            windowed = [] if scheme().for_role(Role.KEY).window else [made for made in found if made.window]
            return (scheme(), *windowed[:1])
        return found if self.over is Over.SETTINGS else tuple(made for made in found if bounded(made))

    def __call__(self, scheme: Scheme) -> None:
        """Try the law on one setting; raises LawBroken, also where the scheme itself raises."""
        try:
            self.body(scheme)
        except Unlike as found:
            raise self._broken(scheme, found.expected, found.found) from None
        except (LeftOut, LawBroken):
            raise
        except Exception as error:
            raise self._broken(scheme, "no exception", f"{type(error).__name__}: {error}") from error

    def _broken(self, scheme: Scheme, expected: str, found: object) -> LawBroken:
        return LawBroken(scheme=_spelled(scheme), law=self.name, expected=expected, found=found, todo=self.todo)

    def __str__(self) -> str:
        return self.name


def law(over: Over, todo: str) -> Callable[[Callable[[Scheme], None]], Law]:
    """Return a decorator that makes a ``Law`` of a function, which tries it on one setting; the law has the function's name."""

    def made(body: Callable[[Scheme], None]) -> Law:
        return Law(body.__name__, over, todo, body)

    return made


def _spelled(scheme: Scheme) -> str:
    """Return the text of a scheme, or its class's name if ``spec`` raises."""
    try:
        return scheme.spec()
    except Exception:  # noqa: BLE001 - a broken scheme must not hide which law it breaks
        return type(scheme).__name__


def settings_of(scheme: type[Scheme]) -> tuple[Scheme, ...]:
    """Return the distinct schemes to try of a class: each of its ``variants`` as the scheme of keys and as the scheme of values."""
    return tuple(dict.fromkeys(variant.for_role(role) for variant in scheme.variants() for role in Role))


def bounded(scheme: Scheme) -> bool:
    """Return whether a scheme announces a bound on its error."""
    return scheme.bound(SlotSpec(1, 128, torch.float32, Role.KEY)) is not None


@contextlib.contextmanager
def known(scheme: type[Scheme]) -> Iterator[None]:
    """Register a scheme's class under its name for a ``with`` block, so that operations can parse it; then restore the registry.

    Raises BadScheme if the object's class is not a scheme class.
    """
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme)):
        raise BadScheme(expected="a class that derives from kvcompile.Scheme", found=scheme)
    before = BY_NAME.get(scheme.name)
    if before is scheme:
        yield
        return
    BY_NAME[scheme.name] = scheme
    admit(scheme)
    parse.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del BY_NAME[scheme.name]
        else:
            BY_NAME[scheme.name] = before
        parse.cache_clear()
