"""Strides: nodes after the old attention may depend on its memory layout, which the new result need not have."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import aten
from kvcompile.passes.graph.operators import Kind, named
from kvcompile.passes.graph.shapes import op_name

PRODUCTS = named(Kind.PRODUCT, Kind.PROJECTION)
"""Operators with results that do not depend on their operands' strides."""


def free_strides(start: fx.Node) -> None:
    """Turn views of an attention's result into reshapes, which copy if its memory layout requires it."""
    stack, seen = [start], set[fx.Node]()
    while stack:
        for user in stack.pop().users:
            if user in seen or op_name(user) in PRODUCTS:
                continue
            seen.add(user)
            stack.append(user)
            if user.target is aten.view.default:
                user.target = aten.reshape.default
