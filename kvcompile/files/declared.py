"""Declared values: converts plain JSON data to a declared type; raises ``FileUnfit`` with the location of a value that does not fit.

::

    @dataclass(frozen=True)
    class Damage:
        path: str
        kl: Annotated[float, Range(0.0)]

    as_declared(list[Damage], json_value)
"""

from __future__ import annotations

import dataclasses
import enum
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import torch

from kvcompile.errors import FileUnfit


@dataclass(frozen=True)
class Range:
    """Bounds of an annotated int or float, both inclusive; NaN and infinities are outside."""

    least: float = -math.inf
    most: float = math.inf

    def holds(self, value: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return math.isfinite(value) and self.least <= value <= self.most


@dataclass(frozen=True)
class AtLeast:
    """Smallest number of items of an annotated list or mapping."""

    items: int


@dataclass(frozen=True)
class Whole:
    """Annotation of a dataclass: a file must give every field, fields with defaults included."""


def as_declared(kind: Any, value: Any, where: str = "the file") -> Any:
    """Return plain data converted to ``kind``. Raises FileUnfit; ``where``: the value's location, for the message.

    Kinds: str, bool, int, float, None, Any; enums by value, dtypes by name; list, tuple, dict, unions; dataclasses from their fields;
    ``Annotated`` with ``Range``, ``AtLeast`` or ``Whole``.
    """
    origin = get_origin(kind)
    if origin is Annotated:
        return _annotated(kind, value, where)
    if origin in {typing.Union, types.UnionType}:
        return _any_of(get_args(kind), value, where)
    if origin in READERS:
        return READERS[origin](get_args(kind), value, where)
    if kind is Any:
        return value
    if kind is torch.dtype:
        return _dtype(value, where)
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind, value, where)
    return _plain(kind, value, where)


def as_plain(value: Any) -> Any:
    """Return a value as the plain data that ``as_declared`` converts back: dataclasses as dicts, enums as values, dtypes as names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def unfit(where: str, expected: object, found: Any) -> FileUnfit:
    """Return the FileUnfit for the value ``found`` at ``where``, where ``expected`` was declared; a long value is shortened."""
    return FileUnfit(where=where, expected=expected, found=reprlib.repr(found))


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind in {None, type(None)}:
        fits = value is None
    elif kind is float:
        # JSON may write 1.0 as 1; an int beyond float's range is refused.
        fits = type(value) is float or (type(value) is int and abs(value) < 1 << 1023)
    else:
        fits = type(value) is kind
    if not fits:
        raise unfit(where, getattr(kind, "__name__", kind), value)
    return float(value) if kind is float else value


def _annotated(kind: Any, value: Any, where: str) -> Any:
    inner, *marks = get_args(kind)
    read = _record(inner, value, where, whole=True) if Whole() in marks else as_declared(inner, value, where)
    for mark in marks:
        if isinstance(mark, Range) and read is not None and not mark.holds(read):
            raise unfit(where, f"a finite number from {mark.least:g} to {mark.most:g}", value)
        if isinstance(mark, AtLeast) and len(read) < mark.items:
            raise unfit(where, f"at least {mark.items} items", value)
    return read


def _any_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return as_declared(kind, value, where)
        except FileUnfit as error:
            last = error
    raise last if len(kinds) == 1 else unfit(where, " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds), value)


def _list(kinds: tuple[Any, ...], value: Any, where: str) -> list[Any]:
    return [as_declared(kinds[0], item, f"{where}[{at}]") for at, item in enumerate(_plain(list, value, where))]


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if kinds[1:] == (Ellipsis,):
        return tuple(_list(kinds[:1], value, where))
    if len(_plain(list, value, where)) != len(kinds):
        raise unfit(where, f"{len(kinds)} items", value)
    return tuple(as_declared(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _dict(kinds: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    given = _plain(dict, value, where)
    return {as_declared(kinds[0], key, where): as_declared(kinds[1], item, f"{where}.{key}") for key, item in given.items()}


READERS: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {list: _list, tuple: _tuple, dict: _dict, Mapping: _dict}
"""Readers of containers, by type."""


def _record(kind: Any, value: Any, where: str, whole: bool = False) -> Any:
    """Return a dataclass ``kind`` from ``value``, a mapping of its fields, each read as its annotation declares.

    A field may be absent if it has a default, unless ``whole``. Raises FileUnfit, with the place ``where``, for other fields and values.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    given = _plain(dict, value, where)
    if unknown := sorted(map(str, given.keys() - fields.keys())):
        raise unfit(where, f"the fields {', '.join(fields)}", unknown[0])
    missing = dataclasses.MISSING
    needed = [name for name, field in fields.items() if whole or field.default is field.default_factory is missing]
    if absent := [name for name in needed if name not in given]:
        raise FileUnfit(where=where, expected=f"the field {absent[0]}", found="none")
    kinds = typing.get_type_hints(kind, include_extras=True)
    return kind(**{name: as_declared(kinds[name], item, f"{where}.{name}") for name, item in given.items()})


def _member(kind: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    for member in kind:
        if type(value) is type(member.value) and value == member.value:
            return member
    raise unfit(where, " or ".join(repr(member.value) for member in kind), value)


def _dtype(value: Any, where: str) -> torch.dtype:
    found = getattr(torch, value, None) if type(value) is str else None
    if not isinstance(found, torch.dtype):
        raise unfit(where, "the name of a dtype, such as float16", value)
    return found
