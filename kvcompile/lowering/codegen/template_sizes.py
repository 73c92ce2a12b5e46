"""Template sizes: sizes and strides as the text of kernel templates, whole whatever stands around them.

Inductor gives a symbolic size as the text of an expression. Put behind a ``*`` as it is, ``1 + s0`` multiplies its first term
alone: an additive bias over a cache that grows was read at the wrong places that way. Templates ask ``size_of`` and
``stride_of``, never Inductor's own ``size`` and ``stride``.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

_WHOLE = re.compile(r"\w+")


def whole(text: object) -> str:
    """The text of an expression, in parentheses unless it is one name or number."""
    text = str(text)
    return text if _WHOLE.fullmatch(text) else f"({text})"


@pass_context
def size_of(context: Context, name: str, axis: int) -> str:
    """The size of an operand along an axis."""
    return whole(context["size"](name, axis))


@pass_context
def stride_of(context: Context, name: str, axis: int) -> str:
    """The stride of an operand along an axis, in elements."""
    return whole(context["stride"](name, axis))


GLOBALS: dict[str, Any] = {"size_of": size_of, "stride_of": stride_of}
"""What a template's globals need."""
