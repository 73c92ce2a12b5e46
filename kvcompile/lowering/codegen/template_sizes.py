"""Sizes and strides in the text of kernel templates, in parentheses so that they can be put into any expression.

Inductor gives a symbolic size as the text of an expression. Behind a ``*``, an unparenthesised ``1 + s0`` multiplies only its first term:
an additive bias over a growing cache was read from wrong addresses that way. Templates call ``size_of`` and ``stride_of``, never
Inductor's own ``size`` and ``stride``.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

_WHOLE = re.compile(r"\w+")


def whole(text: object) -> str:
    """Return the text of an expression, in parentheses unless it is a single name or number."""
    text = str(text)
    return text if _WHOLE.fullmatch(text) else f"({text})"


@pass_context
def size_of(context: Context, name: str, axis: int) -> str:
    """Return the size of operand ``name`` along ``axis``, as text."""
    return whole(context["size"](name, axis))


@pass_context
def stride_of(context: Context, name: str, axis: int) -> str:
    """Return the stride of operand ``name`` along ``axis``, in elements, as text."""
    return whole(context["stride"](name, axis))


GLOBALS: dict[str, Any] = {"size_of": size_of, "stride_of": stride_of}
"""Functions to add to a template's globals."""
