"""Symbolic sizes: no code of ``kvcompile/passes`` reads one as a plain number but where the reading is compared between worlds.

A number that was read off a size holds for the call that the graph was captured with, and the graph is run for others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from kvcompile.passes.graph.shapes import at_most, estimate, hint, same
from kvcompile.passes.graph.worlds import Guards, SizeRead, inside, moved

PASSES = Path(__file__).resolve().parents[2] / "kvcompile" / "passes"

IN_WORLDS = ("match/", "graph/pullback.py", "graph/shapes.py")
"""The code that recognition runs, in every world of a graph, and what it reads sizes with."""

READ = {"hint", "sizes"}
"""Functions of ``shapes`` that give a number for a symbolic size; they raise outside of a world."""

ESTIMATES = {"rewrite/attend.py", "match/mask/masks.py", "graph/shapes.py"}
"""Where a size of the capture may be used: to choose a kernel, and in the report's words."""

TORCH = {"hint", "size_hint", "guarding_hint_or_throw", "optimization_hint", "has_hint", "var_to_val", "backed_var_to_val", "guard_int"}
"""Torch's own ways to the value of a symbol."""


def uses(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of what a source imports from ``shapes``, and of all attributes that it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "kvcompile.passes.graph.shapes":
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}", node.lineno


def test_sizes_are_read_as_numbers_in_worlds_alone() -> None:
    found = []
    for path in PASSES.rglob("*.py"):
        here = path.relative_to(PASSES).as_posix()
        for name, line in uses(path):
            read = name in READ and not here.startswith(IN_WORLDS)
            estimated = name == "estimate" and here not in ESTIMATES
            private = name.removeprefix(".") in TORCH and name.startswith(".") and here != "graph/worlds.py"
            if read or estimated or private:
                found.append(f"{here}:{line}: {name}")
    assert not found, found


@pytest.fixture
def sizes() -> list[torch.SymInt]:
    """Two symbolic sizes, 9 and 5 when they were captured."""
    env = ShapeEnv()
    made = [env.create_symbol(value, ConstantSource(name), DimDynamic.DYNAMIC) for value, name in ((9, "a"), (5, "b"))]
    return [env.create_symintnode(symbol, hint=value) for symbol, value in zip(made, (9, 5), strict=True)]


def test_a_symbolic_size_has_no_number_outside_of_a_world(sizes: list[torch.SymInt]) -> None:
    with pytest.raises(SizeRead, match="symbolic size"):
        hint(sizes[0])
    known = {size.node.expr: value for size, value in zip(sizes, (9, 5), strict=True)}
    other = moved(Guards(sizes[0].node.shape_env), known)
    assert all(other[symbol] != value for symbol, value in known.items())
    for world in (known, other):
        with inside(world):
            assert hint(sizes[0] - sizes[1]) == world[sizes[0].node.expr] - world[sizes[1].node.expr]
    assert not same(sizes[0], sizes[1]) and same(sizes[0] + sizes[1] - sizes[1], sizes[0]) and at_most(0, sizes[0])
    assert estimate(sizes[0]) == 9


def test_a_symbol_that_guards_tie_to_another_moves_with_it(sizes: list[torch.SymInt]) -> None:
    assert bool(sizes[0] - sizes[1] < 6) and bool(sizes[0] - sizes[1] > 2) and bool(sizes[0] % 4 == 1)
    known = {size.node.expr: value for size, value in zip(sizes, (9, 5), strict=True)}
    guards = Guards(sizes[0].node.shape_env)
    other = moved(guards, known)
    assert all(other[symbol] != value for symbol, value in known.items()) and guards.admit(other)


def test_symbols_whose_sum_guards_fix_move_against_each_other(sizes: list[torch.SymInt]) -> None:
    assert bool(sizes[0] + sizes[1] < 15) and bool(sizes[0] + sizes[1] > 13)
    known = {size.node.expr: value for size, value in zip(sizes, (9, 5), strict=True)}
    guards = Guards(sizes[0].node.shape_env)
    other = moved(guards, known)
    assert all(other[symbol] != value for symbol, value in known.items()) and sum(other.values()) == 14 and guards.admit(other)


def test_a_symbol_of_one_value_is_proved_by_guards(sizes: list[torch.SymInt]) -> None:
    """As where nothing stands ahead of a prompt: a product with a size of two at least stays below two."""
    env = sizes[0].node.shape_env
    start = env.create_symintnode(env.create_unspecified_symbol(0, ConstantSource("c"), DimDynamic.DYNAMIC), hint=0)
    assert bool(start >= 0) and bool(start <= 90) and not Guards(env).fixed(start.node.expr)
    assert bool(start * sizes[0] < 2) and Guards(env).fixed(start.node.expr) and not Guards(env).fixed(sizes[0].node.expr)
    assert bool(sizes[1] // 4 == 1) and bool(sizes[1] % 4 == 1) and Guards(env).fixed(sizes[1].node.expr)
    assert bool(sizes[0] <= sizes[1] + 4) and bool(sizes[0] >= sizes[1] + 4)
    assert Guards(env).single(size.node.expr for size in sizes) == {size.node.expr for size in sizes}
