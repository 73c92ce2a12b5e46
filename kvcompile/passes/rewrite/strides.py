"""Strides: what followed the old attention may have counted on how its result lay in memory; ours need not lie so."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import aten
from kvcompile.passes.graph.operators import Kind, named
from kvcompile.passes.graph.shapes import op_name

PRODUCTS = named(Kind.PRODUCT, Kind.PROJECTION)
"""Behind one of these nothing is left of the strides of what went in."""


def free_strides(start: fx.Node) -> None:
    """Let views that follow an attention be copies where they must: its result need not lie in memory as the old one did."""
    stack, seen = [start], set[fx.Node]()
    while stack:
        for user in stack.pop().users:
            if user in seen or op_name(user) in PRODUCTS:
                continue
            seen.add(user)
            stack.append(user)
            if user.target is aten.view.default:
                user.target = aten.reshape.default
