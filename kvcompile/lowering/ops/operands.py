"""The operands of an attention as one record, with the names of the operator's schema, so that no code counts positional arguments.

Eager bodies, meta functions and Inductor's lowerings take the record; arguments of the dispatcher or of a node are converted by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@functools.cache
def names_of(operator: Any) -> tuple[str, ...]:
    """Return the operand names of an ``OpOverload``, in schema order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def named(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operands of a call by schema name, without the operands that have their default values."""
    return {**dict(zip(names_of(operator), args, strict=False)), **kwargs}


@dataclass(frozen=True)
class AttendOperands(Generic[T]):
    """Operands of ``kvcompile::attend``, in schema order; ``operations`` describes each.

    T: tensors, fake tensors, graph nodes or Inductor's boxes; sizes may be symbolic.
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
        """Return the operands in schema order, without trailing ones that equal their defaults."""
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
    """Return the ``attend`` record among an operator's operands by name; other names are ignored."""
    return AttendOperands(**{name: operand for name, operand in given.items() if name in FIELDS})
