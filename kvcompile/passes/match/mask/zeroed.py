"""Zeros after the softmax: whether a step that sets weights to zero changes a weight that the mask before the softmax left visible.

A token hidden before the softmax has a zero weight already, and ``kvcompile::attend`` gives zero weights to a query that sees no token. So
a step may be left out if each of its conditions holds for every visible token:

    softmax(x masked by seen) * seen                       the condition is ``seen``, which holds for every visible token
    where(any(seen, -1), softmax(x masked by seen), 0)     a query with a visible token sees some token
    where(all(x == -inf, -1), 0, softmax(x))               the scores of visible tokens are not minus infinity

Any other condition on whole rows (queries of padding) becomes one more mask, which hides every token. Any other condition on single tokens
is refused: it would leave weights whose sum is not one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes
from kvcompile.passes.match.attention.weights import zero_or_one
from kvcompile.passes.match.mask.expressions import Coords, Expr, LinearForm, read
from kvcompile.passes.match.mask.masks import conditions, conjuncts, negated
from kvcompile.passes.match.sites import Attention, MaskTerm, Miss, Zeroed
from kvcompile.passes.match.soundness import unchanged_since

TOKEN = LinearForm((("T", 1),))
UNREACHED = -1e9
"""A number far below the scores of visible tokens: e to the power of it less the largest score is 0 in every dtype."""
ABSENT = frozenset({"isinf", "isneginf", "isnan"})
"""Tests that no score or weight of a visible token passes."""


def without_effect(attention: Attention, effects: Effects) -> Attention:
    """Return the attention without the zeros after its softmax; raises Miss where one of them changes a visible weight."""
    if not attention.zeroed:
        return attention
    # No other node changes the attention's inner values (``soundness.private``).
    inside, rows = set(attention.nodes), list[MaskTerm]()
    every = [
        conditions(item.term) if unchanged_since(item.term.node, attention.output, effects, inside) else None for item in attention.zeroed
    ]
    zeros = {_bare(item) for asked in every for item in asked or ()}
    fixed = [unchanged_since(term.node, attention.output, effects) for term in attention.masks]
    masks = tuple(_excluding(term, zeros) if still else term for term, still in zip(attention.masks, fixed, strict=True))
    attention = replace(attention, masks=masks)
    seen = {_bare(item) for term, still in zip(masks, fixed, strict=True) if still for item in conditions(term) or ()}
    for zeroed, asked in zip(attention.zeroed, every, strict=True):
        term = zeroed.term
        if asked is not None and all(_Asked(zeroed, seen).holds(item) for item in asked):
            continue
        if "T" in term.roles or term.node in inside:
            raise Miss(
                "weights are set to zero after the softmax that the mask before it leaves visible", term.node,
                advice="mask the scores with the same mask, or divide by the sum of what is left",
            )
        if attention.log_sums is not None:
            raise Miss(
                "weights of whole queries are set to zero after the softmax, and the scores' log-sum is read beside it", term.node,
                advice="mask the scores of those queries instead",
            )
        rows.append(term)
    return replace(attention, masks=(*attention.masks, *rows), zeroed=())


def _excluding(term: MaskTerm, zeros: set[Expr]) -> MaskTerm:
    """Return a mask that fills with a finite number like -1e9 as one that fills with -inf, if the softmax's weights are zeroed too.

    Other masks are returned unchanged. The zeros show that such tokens must be hidden; their part of the sum of weights is e^(-1e9 - the
    largest score), which is zero.
    """
    if not -math.inf < term.fill <= UNREACHED:
        return term
    excluding = replace(term, fill=-math.inf)
    asked = conditions(excluding)
    return excluding if asked is not None and all(_bare(item) in zeros for item in asked) else term


def _bare(expr: Expr) -> Expr:
    """Return an expression without its ``origin`` nodes (except those of loads), so that equal values compare equal."""
    return replace(expr, args=tuple(_bare(item) for item in expr.args), origin=expr.origin if expr.op == "load" else None)


@dataclass(frozen=True)
class _Asked:
    """The conditions that a step puts on a weight, compared with the ones that hold for every visible token (``seen``)."""

    zeroed: Zeroed
    seen: set[Expr]

    def holds(self, item: Expr) -> bool:
        """Return whether a condition holds for every visible token."""
        if _bare(item) in self.seen:
            return True
        if item.op == "not" and item.args[0].op == "load":
            return self._load(item.args[0], False)
        if item.op == "gt" and item.args[0].op == "load" and item.args[1].op == "num" and item.args[1].number == 0.0:
            return self._load(item.args[0], True)
        return item.op == "load" and self._load(item, True)

    def _load(self, item: Expr, wanted: bool) -> bool:
        assert item.origin is not None
        return self._tensor(*item.origin, wanted)

    def _tensor(self, node: fx.Node, coords: Coords, wanted: bool) -> bool:
        """Return whether an element of a computed boolean tensor equals ``wanted`` for every visible token."""
        name = op_name(node)
        if name in {"any", "all"} or (name in {"sum", "amax"} and wanted and zero_or_one(node.args[0])):
            inside = _over_tokens(node, coords)
            return inside is not None and wanted is (name != "all") and self._every(node.args[0], inside, wanted)
        if name in ABSENT:
            return not wanted and self._statistic(node.args[0], coords)
        if name == "isfinite":
            return wanted and self._statistic(node.args[0], coords)
        if name in {"eq", "ne"} and wanted is (name == "ne") and constant(node.args[1]) == float("-inf"):
            return self._statistic(node.args[0], coords)
        if name in {"eq", "ne"} and wanted is (name == "eq") and node.args[0] is node.args[1]:
            return self._statistic(node.args[0], coords)
        return False

    def _every(self, node: object, coords: Coords, wanted: bool) -> bool:
        """Return whether all elements of a boolean tensor at ``coords`` equal ``wanted`` for every visible token."""
        if not is_tensor(node):
            return False
        expr = read(node, coords)
        found = conjuncts(expr if wanted else negated(expr))
        return found is not None and all(self.holds(item) for item in found)

    def _statistic(self, node: object, coords: Coords) -> bool:
        """Return whether a value is the token's own score or weight, or the largest of its query."""
        while isinstance(node, fx.Node):
            own = next((roles for item, roles in self.zeroed.statistics if item is node), None)
            if own is not None:
                # A dim of size one has a single index, whatever its role is.
                wide = [size != 1 for size in sizes(node)]
                return all(form == LinearForm(((role, 1),)) for form, role, many in zip(coords, own, wide, strict=True) if many)
            if op_name(node) == "amax":
                inside = _over_tokens(node, coords)
                if inside is None:
                    return False
                coords = inside
            elif op_name(node) not in COPIES - {"dropout"}:
                return False
            node = node.args[0]
        return False


def _over_tokens(node: fx.Node, coords: Coords) -> Coords | None:
    """Return the coordinates in the operand of a reduction over the tokens alone; None for other reductions."""
    arguments = bind(node)
    shape = sizes(arguments["self"])
    dims: Sequence[int] | int | None = arguments.get("dim")
    given = [dims] if isinstance(dims, int) else list(dims or ())
    if len(given) != 1:
        return None
    dim = int(given[0]) % len(shape)
    rest = coords if len(coords) < len(shape) else (*coords[:dim], *coords[dim + 1 :])
    if any(form.of("T") for form in rest):
        return None
    return (*rest[:dim], TOKEN if shape[dim] != 1 else LinearForm(), *rest[dim:])
