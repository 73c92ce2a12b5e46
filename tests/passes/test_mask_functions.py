"""Masks read as functions of query and position: the function has the mask's value everywhere, and gives the limit that it means."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.graph.casts import cast
from kvcompile.passes.match.mask.expressions import Expr, LinearForm, read
from kvcompile.passes.match.mask.masks import conditions
from kvcompile.passes.match.sites import MaskKind, MaskTerm

QUERIES, TOKENS, START = 3, 7, 2
POSITION, QUERY = LinearForm((("T", 1),)), LinearForm((("S", 1),))
VALUES: dict[str, Callable[..., float]] = {
    "le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "and": lambda *x: all(x), "or": lambda *x: any(x),
    "not": operator.not_, "truth": bool, "where": lambda c, yes, no: yes if c else no, "add": operator.add, "sub": operator.sub,
    "mul": operator.mul,
}


def number(form: LinearForm, at: dict[str, int]) -> int:
    """A linear form's value where its axes have these values."""
    return sum(coefficient * at[axis] for axis, coefficient in form.terms) + int(form.const)


def value(expr: Expr, at: dict[str, int]) -> float:
    """An expression's value, for expressions that read no tensor."""
    if expr.op == "num":
        return expr.number
    if expr.op == "idx":
        return number(expr.linear, at)
    return float(VALUES[expr.op](*(value(arg, at) for arg in expr.args)))


def traced(make: Callable[[], torch.Tensor]) -> fx.Node:
    """The node of what a function makes."""
    graph = make_fx(make, tracing_mode="fake")().graph
    return next(iter(graph.find_nodes(op="output"))).args[0]  # type: ignore[return-value]


def positions() -> torch.Tensor:
    return torch.arange(TOKENS)


def queries() -> torch.Tensor:
    return torch.arange(QUERIES)[:, None] + START


MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "causal": lambda: positions() <= queries(),
    "distance": lambda: (queries() - positions() < 3) & (queries() - positions() >= 0),
    "filled triangle": lambda: torch.full((QUERIES, TOKENS), -math.inf).triu(START + 1),
    "triangle of a number": lambda: torch.full((QUERIES, TOKENS), 0.5).tril(START),
    "triangle of ones": lambda: torch.ones(QUERIES, TOKENS).tril(START),
    "one minus": lambda: 1 - (positions() <= queries()).int(),
    "minus one": lambda: (positions() <= queries()).float() - 1,
    "number in half precision": lambda: torch.full((QUERIES, TOKENS), -6e4, dtype=torch.float16).triu(START + 1),
    "chosen": lambda: torch.where(positions() <= queries(), 0.0, -1e9),
    "either": lambda: (positions() < 2) | ~(positions() > queries()),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_function_has_the_masks_value(name: str) -> None:
    node, mask = traced(MASKS[name]), MASKS[name]()
    expr = read(node, (QUERY, POSITION))
    assert expr.op != "load", "the mask is understood"
    found = [[value(expr, {"S": query, "T": position}) for position in range(TOKENS)] for query in range(QUERIES)]
    assert torch.equal(torch.tensor(found, dtype=torch.float64), mask.double())


@pytest.mark.parametrize("make", [
    lambda: (1 - (positions() > queries()).int()).bool(), lambda: ~(positions() > queries()), lambda: positions() <= queries(),
], ids=["one minus", "not", "itself"])
def test_every_spelling_is_one_limit(make: Callable[[], torch.Tensor]) -> None:
    found = conditions(MaskTerm(traced(make), MaskKind.BOOL, ("S", "T")))
    assert found is not None and [item.op for item in found] == ["le"]


def test_sums_of_linear_forms() -> None:
    form = QUERY.plus(LinearForm(const=2)).plus(POSITION, -1)
    assert (form.of("S"), form.of("T"), form.of("B"), form.const) == (1, -1, 0, 2)
    assert form.plus(POSITION).plus(QUERY, -1) == LinearForm(const=2)


@pytest.mark.parametrize(("given", "dtype", "kept"), [
    (0.5, torch.float32, 0.5), (2.75, torch.int64, 2.0), (-2.75, torch.int32, -2.0), (0.5, torch.bool, 1.0), (1e5, torch.float16, math.inf),
    (-1e5, torch.float16, -math.inf), (65519.0, torch.float16, 65504.0), (-math.inf, torch.bfloat16, -math.inf),
])
def test_a_number_in_another_dtype(given: float, dtype: torch.dtype, kept: float) -> None:
    assert cast(given, dtype) == kept
    if abs(given) <= 1e4:
        assert torch.tensor(given, dtype=torch.float64).to(dtype).item() == kept
