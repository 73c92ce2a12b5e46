"""Prints the sympy bounds as ATen and Triton code whose results still bound: rounding errors raise upper bounds and lower the lower ones.

The relative error of evaluating an expression is derived from the expression itself, node by node, for the unit roundoff of the dtype it is
evaluated in: sums of nonnegative terms and products add up, exp multiplies the error of its argument by the argument, 1 - exp(-x) and tanh
are well conditioned. A difference of nonnegative numbers cancels and is refused (``UnprintableBound``), except in the argument of exp and
for ``Rise``. The printed value is then moved by that error, and by the least normal number, in the bound's direction. Symbols count as
exact, since a bound that is an input of another bound has its error added already; ``INPUT_ERRORS`` names the exceptions.

Algebra of blocks and heads runs in float64: one evaluation per block of 16 tokens, so that neither exp(Delta) nor a
mass below the least float32 needs a special case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy
import torch
from sympy.printing.str import StrPrinter

from kvcompile.errors import CompileError
from kvcompile.schemes.certificate.bounds import CHANNELS, WEIGHT, Bound, BoundUnit, Outward, Rise

INPUT_ERRORS: dict[sympy.Symbol, float] = {WEIGHT: 2.0**-15, CHANNELS: 2.0**-12}
"""Relative errors of inputs that a kernel sums in float32: 16 exponentials of arguments above -104; up to 1,024 channels."""

LARGEST_ARGUMENT = 1024.0
"""In float64, exp is zero below minus this and infinite above it, so larger errors of an argument do not matter."""

FUNCTION = 8.0
"""Largest error of exp, expm1 and tanh on any backend, in units in the last place."""

UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


class UnprintableBound(CompileError):
    """A bound contains an operation whose rounding error is not known here."""

    template = (
        "expected a bound of nonnegative sums, products, quotients, Min, Max, exp, tanh and Rise, found {found}; rewrite the bound "
        "without it, or teach kvcompile/lowering/certificate/bound_printer.py its rounding error"
    )


def relative_error(expression: sympy.Expr, unit: float) -> float:
    """Return a bound on the relative error of ``expression``, evaluated with unit roundoff ``unit``.

    Raises UnprintableBound where the error is not known.
    """
    if expression.is_Symbol:
        return INPUT_ERRORS.get(expression, 0.0)
    if expression.is_number:
        return unit
    of = [relative_error(argument, unit) for argument in expression.args] if not isinstance(expression, sympy.exp) else []
    if isinstance(expression, (sympy.Min, sympy.Max)):
        return max(of)
    if isinstance(expression, sympy.Abs) and expression.args[0].is_Symbol:
        return of[0]
    if isinstance(expression, sympy.exp):
        # The argument may have terms of both signs: its absolute error is that of its terms.
        terms = sympy.Add.make_args(expression.args[0])
        if not all(term.is_Symbol or (-term).is_Symbol for term in terms):
            raise UnprintableBound(found=f"exp of {expression.args[0]}")
        return (len(terms) * LARGEST_ARGUMENT + FUNCTION) * unit
    if isinstance(expression, Rise):
        return of[0] + FUNCTION * unit
    if isinstance(expression, sympy.tanh):
        return of[0] + FUNCTION * unit
    if not expression.is_nonnegative:
        raise UnprintableBound(found=f"{expression}, which may be negative")
    if expression.is_Add:
        if not all(term.is_nonnegative for term in expression.args):
            raise UnprintableBound(found=f"the difference {expression}")
        return max(of) + (len(of) - 1) * unit
    if expression.is_Mul:
        return sum(of) + (len(of) - 1) * unit
    if expression.is_Pow and expression.args[1] == -1:
        return of[0] + unit
    if expression.is_Pow and expression.args[1] == 2:
        return 2 * of[0] + unit
    raise UnprintableBound(found=f"{type(expression).__name__} in {expression}")


class _Aten(StrPrinter):
    """Prints expressions as Python over torch; every name is a tensor or a number."""

    def _call(self, name: str, expression: sympy.Expr) -> str:
        return f"torch.{name}({self._print(expression.args[0])})"

    def _print_exp(self, expr: sympy.Expr) -> str:
        return self._call("exp", expr)

    def _print_tanh(self, expr: sympy.Expr) -> str:
        return self._call("tanh", expr)

    def _print_Abs(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._call("abs", expr)

    def _print_Rise(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"(-torch.expm1(-({self._print(expr.args[0])})))"

    def _nested(self, name: str, expression: sympy.Expr) -> str:
        return functools.reduce(lambda left, right: f"torch.{name}({left}, {right})", map(self._print, expression.args))

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._nested("minimum", expr)

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._nested("maximum", expr)

    def _print_Float(self, expr: sympy.Expr) -> str:  # noqa: N802
        return repr(float(expr))

    def _print_Rational(self, expr: sympy.Expr) -> str:  # noqa: N802
        return repr(float(expr))

    def _print_Integer(self, expr: sympy.Expr) -> str:  # noqa: N802
        return repr(float(expr))


class _TritonPrinter(_Aten):
    """Prints expressions as Triton, with helpers of ``kernels.bounds`` for tanh and Rise; NaN propagates as in ATen."""

    def _call(self, name: str, expression: sympy.Expr) -> str:
        return f"tl.{name}({self._print(expression.args[0])})"

    def _print_tanh(self, expr: sympy.Expr) -> str:
        return f"tanh({self._print(expr.args[0])})"

    def _print_Rise(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"rise({self._print(expr.args[0])})"

    def _nested(self, name: str, expression: sympy.Expr) -> str:
        nan = "propagate_nan=tl.PropagateNan.ALL"
        return functools.reduce(lambda left, right: f"tl.{name}({left}, {right}, {nan})", map(self._print, expression.args))


def dtype_of(bound: Bound) -> torch.dtype:
    """Return the dtype in which a bound is evaluated: float32 for one value per channel, otherwise float64."""
    return torch.float32 if bound.over is BoundUnit.CHANNEL else torch.float64


def _signed(bound: Bound) -> bool:
    """Return whether a bound is a sum with a signed symbol (a log-mass).

    Its rounding error is then relative to its terms, not to the sum.
    """
    terms = bound.expression.args
    return bound.expression.is_Add and all(term.is_Symbol for term in terms) and not all(term.is_nonnegative for term in terms)


def slack(bound: Bound) -> float:
    """Return the relative amount by which a printed bound is raised, or lowered if it bounds from below: twice its error; 0 if signed.

    Twice, to cover the rounding of that step too.
    """
    if _signed(bound):
        return 0.0
    unit = UNITS[dtype_of(bound)]
    return 2 * (relative_error(bound.expression, unit) + 4 * unit)


def aten_source(bound: Bound) -> str:
    """Return a Python expression over torch that evaluates a bound and adds its rounding error, so that the result is still a bound.

    The error is added upwards or downwards, by the bound's direction. Raises UnprintableBound for an operation with an unknown error.
    """
    return _outward(bound, _Aten(), "abs")


def triton_source(bound: Bound) -> str:
    """Return the source of a Triton function that takes the bound's arguments, in order, and returns the bound moved by its rounding error.

    The arguments are float64 blocks or numbers. Raises UnprintableBound for a bound that is evaluated in float32 (``dtype_of``), and for an
    operation with an unknown rounding error.
    """
    if dtype_of(bound) is not torch.float64:
        raise UnprintableBound(found=f"{bound.name} in float32, which kernels take as constants")
    return f"@triton.jit\ndef {bound.name}({', '.join(bound.arguments)}):\n    return {_outward(bound, _TritonPrinter(), 'tl.abs')}\n"


def _outward(bound: Bound, printer: StrPrinter, magnitude: str) -> str:
    text = printer.doprint(bound.expression)
    if _signed(bound):
        unit = UNITS[dtype_of(bound)]
        size = " + ".join(f"{magnitude}({printer.doprint(term)})" for term in bound.expression.args)
        text, margin = f"({text})", f"{8 * unit!r} * ({size})"
        return f"{text} + {margin}" if bound.outward is Outward.UP else f"{text} - {margin}"
    moved = slack(bound) if bound.outward is Outward.UP else -slack(bound)
    return f"({text}) * {1 + moved!r}"


@functools.cache
def aten(bound: Bound) -> Callable[..., torch.Tensor]:
    """Return a torch function that computes a bound from arguments by name, tensors of dtype ``dtype_of(bound)`` or numbers."""
    source = f"lambda {', '.join(bound.arguments)}: {aten_source(bound)}"
    return eval(source, {"torch": torch, "abs": abs})


UP32 = (1 + 2.0**-22, 2.0**-126)
"""Factor and addend that compensate rounding to float32, even if denormals are flushed to zero."""


def up32(x: torch.Tensor) -> torch.Tensor:
    """Return nonnegative float64 numbers rounded up to float32, in the shape of ``x``; the results are above zero, even for zero."""
    return (x * UP32[0] + UP32[1]).to(torch.float32)
