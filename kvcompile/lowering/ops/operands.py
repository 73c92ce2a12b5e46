"""Operands of an attention as one record, whose fields are those of the operator's schema: nobody counts twenty of them.

Bodies, meta functions and Inductor's lowerings take records; what the dispatcher or a graph's node has becomes one at once, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@functools.cache
def names_of(operator: Any) -> tuple[str, ...]:
    """The names of the operands of an ``OpOverload``, in the order of its schema."""
    return tuple(argument.name for argument in operator._schema.arguments)


def named(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The operands of a call of an operator by the names of its schema; those that are left to their defaults are missing."""
    return {**dict(zip(names_of(operator), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class AttendOperands(Generic[T]):
    """Operands of ``kvcompile::attend`` as ``operations`` describes them, in the order of its schema.

    T: tensors, fake tensors, nodes of a graph or boxes of Inductor's; sizes may be symbols.
    """

    q: T
    keys: Sequence[T]
    values: Sequence[T]
    hi: T
    lo: T | None
    keep: T | None
    bias: T | None
    sinks: T | None
    key_scheme: str
    value_scheme: str
    scale: float
    softcap: float
    value_dim: Any
    exact_newest: Sequence[T] | None = None
    base: T | None = None
    rope: Sequence[T] | None = None
    interleaved: bool = False
    extra_key_planes: Sequence[T] | None = None
    extra_key_scheme: str = ""
    extra_key_dim: Any = 0
    exact_first: Sequence[T] | None = None
    exact_first_at: T | None = None
    fill: float | None = None
    log_sums: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """The operands in the schema's order, without those at the end that have their defaults."""
        found = [getattr(self, name) for name in NAMES]
        while len(found) > REQUIRED and found[-1] is DEFAULTS[len(found) - 1 - REQUIRED]:
            found.pop()
        return tuple(found)


# Dynamo traces ``arguments`` and knows no ``MISSING``.
NAMES = tuple(field.name for field in fields(AttendOperands))
DEFAULTS = tuple(field.default for field in fields(AttendOperands) if field.default is not MISSING)
REQUIRED = len(NAMES) - len(DEFAULTS)
FIELDS = frozenset(NAMES)


def attend_operands(given: Mapping[str, Any]) -> AttendOperands:
    """The record of an operator whose schema has operands of ``attend`` among others, from all of its operands by name."""
    return AttendOperands(**{name: operand for name, operand in given.items() if name in FIELDS})
