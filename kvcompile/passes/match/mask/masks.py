"""Masks in normal form: limits on positions, a padding row, and all other terms carried as tensors.

Every term is read as a predicate (``expressions``) and split into conjuncts. Each conjunct is one of

    position <= limit(row, query)      hi      (causal, length)
    position >= limit(row, query)      lo      (sliding window)
    tensor[row, position]              keep    (padding)

or its term is carried along as a tensor operand, which is slower to read and never wrong.

::

    seen = and(le(arange(T), pos), gt(arange(T), sub(pos, 64)));  masked_fill(scores, bitwise_not(and(seen, padding)), -inf)
    after:
    attend(..., hi=pos, lo=sub(pos, 63), keep=padding)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.casts import LONGEST, lowest
from kvcompile.passes.graph.constants import known
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import estimate, same, value_of
from kvcompile.passes.match.attention.steps import LEAST_FACTOR, SEEN, UNSEEN
from kvcompile.passes.match.mask.expressions import Expr, LinearForm, read
from kvcompile.passes.match.sites import Amount, Attention, Bounds, Limit, LimitKind, MaskKind, MaskTerm, Miss
from kvcompile.passes.match.soundness import unchanged_since

NEGATED = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}
UPPER = {
    LimitKind.NODE: "causal by position", LimitKind.OWN: "causal", LimitKind.ALL: "length", LimitKind.CONST: "fixed length",
}
MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}


class _Carried(Exception):
    """Raised for a conjunct that is not arithmetic on positions: its term stays a tensor."""


def negated(expr: Expr) -> Expr:
    """Return the opposite of a predicate: comparisons and alternatives are inverted, other predicates wrapped in ``not``."""
    if expr.op in NEGATED:
        return Expr(NEGATED[expr.op], expr.args)
    if expr.op == "not":
        return expr.args[0]
    if expr.op == "or":
        return Expr("and", tuple(negated(arg) for arg in expr.args))
    return Expr("not", (expr,))


def _predicate(expr: Expr, term: MaskTerm) -> Expr:
    """Return the condition under which an additive mask is zero; raises _Carried unless the mask surely hides the token otherwise."""
    if expr.op == "where":
        condition, yes, no = expr.args
        if _hides(yes, term):
            return Expr("and", (negated(condition), _predicate(no, term)))
        if _hides(no, term):
            return Expr("and", (condition, _predicate(yes, term)))
    if expr.op == "add":
        return Expr("and", tuple(_predicate(arg, term) for arg in expr.args))
    if expr.op == "num" and expr.number == 0.0:
        return Expr("num", number=1.0)
    raise _Carried


def _hides(expr: Expr, term: MaskTerm) -> bool:
    return expr.op == "num" and expr.number * term.factor <= hidden_at(term) * abs(term.factor)


def hidden_at(term: MaskTerm) -> float:
    """Return the largest number that an added mask may have to surely hide a token: the least number of the dtype of the sum, or -inf.

    A larger number may not hide: a softmax does not change if a number is added to all scores of a row, so a token at -20000 is visible if
    all others are at -1e9, and scores may be lower than -10000.
    """
    return lowest(term.dtype) if abs(term.factor) >= LEAST_FACTOR else -math.inf


def _finite(expr: Expr, term: MaskTerm) -> bool:
    """Return whether an added mask is made of integers and of numbers far from the ends of its dtype, so that it hides no token."""
    if expr.op == "load":
        assert expr.origin is not None
        return not value_of(expr.origin[0]).dtype.is_floating_point or _moderate(expr.origin[0])
    if expr.op == "num":
        return abs(expr.number) < -lowest(term.dtype) / 2
    return all(_finite(arg, term) for arg in expr.args)


def _moderate(node: fx.Node) -> bool:
    """Return whether a tensor is a known constant with no element larger than the largest possible position, such as ALiBi's slopes."""
    value = known(node)
    return value is not None and bool((value.abs() <= LONGEST).all())


def _bias(term: MaskTerm) -> bool:
    """Return whether a term adds finite numbers to the scores, in dtypes with at least the range of bfloat16."""
    dtypes = {term.dtype, value_of(term.node).dtype}
    wide = all(dtype.is_floating_point and torch.finfo(dtype).max >= torch.finfo(torch.bfloat16).max for dtype in dtypes)
    return term.kind is MaskKind.ADD and wide and _finite(_function(term), term)


def _conjuncts(expr: Expr) -> list[Expr]:
    """Return the conditions that must all hold where a predicate holds, none if it always holds; raises _Carried if it never does."""
    if expr.op == "and":
        return [item for arg in expr.args for item in _conjuncts(arg)]
    if expr.op == "not":
        inner = negated(expr.args[0])
        return [inner] if inner.op == "not" else _conjuncts(inner)
    if expr.op == "num":
        if expr.number == 0.0:
            raise _Carried
        return []
    if expr.op == "where" and expr.args[2].op == "num" and expr.args[2].number == 0.0:
        return _conjuncts(expr.args[0]) + _conjuncts(expr.args[1])
    return [expr]


def _sum(expr: Expr, sign: int, form: LinearForm, atoms: list[tuple[int, Expr]]) -> LinearForm:
    """Return ``form`` plus ``sign`` times an expression's linear part.

    Parts that do not depend on the cached position go to ``atoms``, each whole and with its sign. Raises _Carried for
    fractions and for other operations on that position.
    """
    if expr.op == "num":
        if not expr.number.is_integer():
            raise _Carried
        return form.plus(LinearForm(const=int(expr.number)), sign)
    if expr.op == "idx":
        return form.plus(expr.linear, sign)
    if expr.op in {"add", "sub"} and expr.uses("T"):
        form = _sum(expr.args[0], sign, form, atoms)
        return _sum(expr.args[1], sign if expr.op == "add" else -sign, form, atoms)
    if expr.uses("T"):
        raise _Carried
    atoms.append((sign, expr))
    return form


def _limit(atoms: list[tuple[int, Expr]], form: LinearForm, wanted: int, offset: Any, effects: Effects) -> Limit:
    """Return the limit of a comparison of positions with ``atoms`` plus ``form``: a tensor of positions, the query's index or a constant.

    ``atoms``: (sign, expression) of the terms that the cached position does not enter. ``form``: the terms linear in axes.
    ``wanted``: the sign that the terms must have. ``offset``: the constant term. Raises _Carried for every other sum.
    """
    own = form.of("S") * wanted
    offset, amount = _split(offset)
    if any(form.of(axis) for axis in ("B", "H", "K", "G")):
        raise _Carried
    if not atoms:
        if own == 1:
            return Limit(LimitKind.OWN, offset, amount=amount)
        if own:
            raise _Carried
        return Limit(LimitKind.CONST, offset, amount=amount)
    if len(atoms) > 1 or atoms[0][0] != wanted or own:
        # Two terms of which one is the query's index: the sum may exist as a node of its own.
        raise _Carried
    atom = atoms[0][1]
    node, roles = _plain(atom, "S", effects)
    if value_of(node).dtype.is_floating_point:
        raise _Carried
    return Limit(LimitKind.NODE, offset, node, roles, amount)


def _split(number: Any) -> tuple[int, Amount | None]:
    """Return an int or a SymInt as (constant part, symbolic rest); the rest is None for an int."""
    if isinstance(number, int):
        return number, None
    const, rest = number.node.expr.as_coeff_Add()
    return int(const), Amount(rest, number - int(const))


def _plain(expr: Expr, axis: str, effects: Effects) -> tuple[fx.Node, tuple[str, ...]]:
    """Return the tensor that holds the value of an expression, and the roles of its dims: "B", ``axis``, or "" for a dim of size 1.

    Raises _Carried if no tensor holds the value, if it has other dims, or if something writes to it.
    """
    if expr.origin is None:
        raise _Carried
    node, coords = expr.origin
    if not isinstance(value_of(node), torch.Tensor) or effects.writes_to(node):
        raise _Carried
    roles = []
    for coord in coords:
        if not same(coord.const, 0) or len(coord.terms) > 1 or (coord.terms and coord.terms[0] not in {("B", 1), (axis, 1)}):
            raise _Carried
        roles.append(str(coord.terms[0][0]) if coord.terms else "")
    return node, tuple(roles)


def _compared(expr: Expr, effects: Effects) -> tuple[bool, Limit]:
    """Return, of a comparison with the cached position: (whether it is an upper limit of that position, the limit).

    Raises _Carried for other comparisons.
    """
    atoms: list[tuple[int, Expr]] = []
    form = _sum(expr.args[1], -1, _sum(expr.args[0], 1, LinearForm(), atoms), atoms)
    op, side = expr.op, form.of("T")
    if side not in {1, -1}:
        raise _Carried
    if side == -1:
        op = MIRRORED[op]
    # side * (position) <op> -(atoms + rest), so everything else changes sign with the side.
    rest = form.plus(LinearForm((("T", side),)), -1)
    offset = -side * rest.const
    limit = _limit(atoms, rest, -side, offset, effects)
    shift = {"le": 0, "lt": -1, "ge": 0, "gt": 1}[op]
    return op in {"le", "lt"}, replace(limit, offset=limit.offset + shift)


def _padding(expr: Expr, effects: Effects) -> tuple[object, tuple[str, ...]]:
    """Return the tensor that a padding conjunct reads and the roles of its dims.

    Raises _Carried unless the tensor is of ints or bools and has a dim of tokens.
    """
    if expr.op == "truth":
        expr = expr.args[0]
    if expr.op != "load":
        raise _Carried
    node, roles = _plain(expr, "T", effects)
    if roles.count("T") != 1:
        raise _Carried
    if value_of(node).dtype.is_floating_point:
        raise _Carried
    return node, tuple(roles)


def _function(term: MaskTerm) -> Expr:
    return read(term.node, tuple(LinearForm(((role, 1),)) if role else LinearForm() for role in term.roles))


def _term(term: MaskTerm, bounds: dict[str, object], effects: Effects) -> None:
    """Add one term's limits to ``bounds``; raises _Carried where one of its conjuncts must stay a tensor."""
    if term.fill != -math.inf:
        raise _Carried
    expr = _function(term)
    if term.kind is MaskKind.ADD:
        expr = _predicate(expr, term)
    elif term.kind is MaskKind.FILL:
        expr = negated(expr)
    found: dict[str, object] = {}
    failed = False
    for conjunct in _conjuncts(expr):
        try:
            if conjunct.op in NEGATED:
                upper, limit = _compared(conjunct, effects)
                key, value = ("hi" if upper else "lo"), limit
            else:
                key, value = "keep", _padding(conjunct, effects)  # type: ignore[assignment]
            if (key in found and found[key] != value) or (key in bounds and bounds[key] != value):
                failed = True
            else:
                found[key] = value
        except _Carried:
            failed = True
    # A limit that was understood holds even where the rest of its term is carried.
    bounds.update(found)
    if failed:
        raise _Carried


def normalise(attention: Attention, effects: Effects) -> Bounds:
    """Return the mask of an attention in normal form: limits on positions, a padding mask, and the terms carried as tensors.

    A finite number may replace scores (in place of -inf) only in the last term, after nothing but biases; raises Miss otherwise.
    """
    bounds: dict[str, object] = {}
    carried, places = [], []
    for place, term in enumerate(attention.masks):
        try:
            if not unchanged_since(term.node, attention.output, effects):
                raise _Carried
            _term(term, bounds, effects)
        except _Carried:
            # Decided here for all passes: an expression can be read only while sizes are numbers.
            carried.append(replace(term, hides=_may_hide(term)))
            places.append(place)
    replaced = next((term for term in carried if term.fill != -math.inf), None)
    # -inf in the bias operand will mark replaced scores, so no other term may be -inf, and the replacement must be the last term.
    biases = all(term is replaced or _bias(term) for term in carried) if replaced is not None else True
    if replaced is not None and not (biases and carried[-1] is replaced and places == list(range(len(places)))):
        raise Miss(
            f"masked scores are replaced by {replaced.fill:g}, {SEEN}, and there is another mask", replaced.node, advice=UNSEEN,
        )
    hi = bounds.get("hi")
    if attention.causal:
        hi = Limit(LimitKind.OWN)
    if hi is None:
        hi = Limit(LimitKind.ALL)
    return Bounds(hi, bounds.get("lo"), bounds.get("keep"), tuple(carried))  # type: ignore[arg-type]


def conditions(term: MaskTerm) -> list[Expr] | None:
    """Return all conditions under which a mask shows a token, over axes named by roles; None for a mask that may hide no token.

    Biases, and masks that replace scores by a finite number, do not surely hide a token.
    """
    if term.fill != -math.inf:
        return None
    expr = _function(term)
    try:
        if term.kind is MaskKind.ADD:
            expr = _predicate(expr, term)
    except _Carried:
        return None
    return conjuncts(negated(expr) if term.kind is MaskKind.FILL else expr)


def conjuncts(expr: Expr) -> list[Expr] | None:
    """Return the conditions that must all hold where a predicate holds: none if it always holds, None if it never does."""
    try:
        return _conjuncts(expr)
    except _Carried:
        return None


def hiding(bounds: Bounds) -> tuple[MaskTerm, ...]:
    """Return the masks along the cached tokens that may hide some of them, from which a last visible position can be read."""
    terms = [term for term in bounds.carried if term.hides]
    if bounds.keep is not None:
        node, roles = bounds.keep
        terms.append(MaskTerm(node, MaskKind.BOOL, roles))
    return tuple(terms)


def _may_hide(term: MaskTerm) -> bool:
    """Return whether a carried term has a dim of tokens and may hide some of them."""
    if "T" not in term.roles or term.fill != -math.inf:
        return False
    return term.kind is not MaskKind.ADD or (term.factor > 0.0 and not _finite(_function(term), term))


def shown_by(term: MaskTerm, mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens the values ``mask`` of a mask show to queries, bool in the shape of ``mask``."""
    if term.kind is MaskKind.ADD:
        return ~(mask <= hidden_at(term))
    return mask == 0 if term.kind is MaskKind.FILL else mask if mask.dtype is torch.bool else mask != 0


def describe(bounds: Bounds) -> str:
    """Return a mask in words, for the report."""
    words = UPPER[bounds.hi.kind]
    if bounds.lo is not None:
        words += " + window"
    if bounds.keep is not None:
        words += " + padding"
    for term in bounds.carried:
        shape = "x".join(str(estimate(size)) for size in value_of(term.node).shape)
        words += f" + {'bias' if term.kind is MaskKind.ADD else 'mask'} tensor [{shape}]"
        words += f" that leaves {term.fill:g}" if term.fill != -math.inf else ""
    return words
