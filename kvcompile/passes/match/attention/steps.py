"""Steps on the scores, from the product to the softmax, read one by one into a normal form: scale, softcap, masks, sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import fx

from kvcompile.passes.graph.casts import cast, lowest
from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES, TURNS, Kind, named
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, operand, sizes, value_of
from kvcompile.passes.match.attention.products import NAMES, Product
from kvcompile.passes.match.attention.roles import Dims, Letters
from kvcompile.passes.match.attention.sums import Summand, summand
from kvcompile.passes.match.sites import Factor, MaskKind, Miss

RESHAPES = named(Kind.RESHAPE, Kind.UNSQUEEZE)
LEAST_FACTOR = 0.05
"""The least factor of scores that were masked with the lowest number of their dtype; after a smaller one they may be visible."""
MASKING = -1e4
"""The largest number that masks the scores that it replaces; unless it is the dtype's lowest, the result is still a score."""
SEEN = "which still counts where all other scores are lower"
"""Text of refusals: when a token is seen although a number above the lowest of its dtype replaces its score."""
UNSEEN = "fill with -inf or with the lowest number of the scores' dtype (torch.finfo(scores.dtype).min)"
"""Text of refusals: the numbers that hide a token for certain."""
PLAIN = "mask with masked_fill(..., -inf), torch.where or an added mask, and scale by a number"


@dataclass
class Term:
    """A mask operand, its effect on the scores, and the letters of its dims."""

    node: fx.Node
    kind: MaskKind
    dims: Dims
    factor: float = 1.0
    dtype: torch.dtype = torch.float32
    fill: float = -math.inf

    @property
    def score(self) -> float:
        """The final score of an excluded token: -inf where ``fill`` is the lowest number of its dtype, else ``fill`` times ``factor``."""
        return -math.inf if self.fill <= lowest(self.dtype) else self.fill * self.factor


Statistics = tuple[tuple[fx.Node, Dims], ...]
"""Scores and weights that a mask of weights may be computed from, each with its dims."""


@dataclass
class Scores:
    """The normal form of scores, filled in while the steps are read from the product to the softmax."""

    product: Product
    letters: Letters
    dims: Dims
    scale: float = 1.0
    cap: float = 0.0
    capping: bool = False
    masks: list[Term] = field(default_factory=list)
    sinks: fx.Node | None = None
    sinks_first: bool = False
    sink_dims: Dims = ()
    beside: Summand | None = None
    """A second product that is added, its factor relative to the first product's before any scale: more channels of queries and keys."""
    instead: Term | None = None
    """The second product as a mask, for the reading in which it is no product with cached keys."""
    zeroed: list[tuple[Term, Statistics]] = field(default_factory=list)
    """Masks of weights, each with the scores and weights that it may be computed from."""
    rounding: float = 0.0
    factors: list[Factor] = field(default_factory=list)
    """Factors of the scores that only a call knows."""
    log_sums: fx.Node | None = None
    log_sum_dims: Dims = ()

    def mask(
        self, node: fx.Node, kind: MaskKind, factor: float = 1.0, dtype: torch.dtype = torch.float32, fill: float = -math.inf,
    ) -> None:
        """Record a mask operand of the scores, with its dims aligned right with those of the scores.

        ``kind``: its effect on the scores; ``factor``, ``dtype``: its factor, and the dtype in which it is added; ``fill``: the number that
        excluded scores become. Raises Miss where it broadcasts over part of a flattened dim.
        """
        self.masks.append(replace(self.term(node, kind, self.dims), factor=factor, dtype=dtype, fill=fill))

    def term(self, node: fx.Node, kind: MaskKind, masked: Dims) -> Term:
        """Return the mask term of an operand whose dims align right with ``masked``, the masked tensor's dims.

        Raises Miss where it broadcasts over part of a flattened dim.
        """
        shape = sizes(node)
        aligned = masked[len(masked) - len(shape) :]
        dims = []
        for dim, size in zip(aligned, shape, strict=True):
            whole = 1
            for letter in dim:
                whole *= self.letters.size[letter]
            if size not in {1, whole}:
                raise Miss("a mask that broadcasts over part of a flattened dim of the scores", node, advice=PLAIN)
            dims.append(dim if size == whole else ())
        return Term(node, kind, tuple(dims))


def scores_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand of a step that carries the scores (of ``where``, the branch that is not a constant); None for other nodes."""
    name = op_name(node)
    if name == "where":
        branches = [item for item in node.args[1:3] if is_tensor(item) and constant(item) is None]
        return branches[0] if len(branches) == 1 else None
    if name == "cat":
        operands = list(node.args[0])  # type: ignore[arg-type]
        if len(operands) != 2:
            return None
        return max(operands, key=lambda item: sizes(item)[-1])  # type: ignore[no-any-return]
    if name in {"add", "add_", "mul", "mul_", "maximum"} and is_tensor(node.args[0]) and len(node.args) > 1 and is_tensor(node.args[1]):
        first, second = node.args[0], node.args[1]
        if constant(second) is not None:
            return first
        return first if _reaches_product(first) else second
    if name in {"add", "mul"} and not is_tensor(node.args[0]) and is_tensor(node.args[1]):
        return node.args[1]
    known = SCORE_STEPS.keys() | COPIES | RESHAPES | TURNS | {"slice"}
    return node.args[0] if name in known and node.args and is_tensor(node.args[0]) else None


def _reaches_product(node: object, depth: int = 24) -> bool:
    """Return whether the first operands of a value lead to a product of tensors within ``depth`` steps."""
    while isinstance(node, fx.Node) and depth:
        if op_name(node) in NAMES - {"mm", "addmm"}:
            return True
        if not node.args or op_name(node) in {"linear", "embedding"}:
            return False
        if op_name(node) in {"mm", "addmm"}:
            return True
        node, depth = (node.args[1] if op_name(node) == "where" else node.args[0]), depth - 1
    return False


def _scaled(state: Scores, node: fx.Node, factor: float) -> None:
    """Multiply the scores by a number; directly after a tanh, the number becomes the softcap instead.

    Raises Miss for a mask between a tanh and its factor, after a softcap, for a factor that is not positive after a mask, or if the product
    would make an earlier mask too weak to hide tokens.
    """
    if state.capping:
        if state.masks:
            raise Miss("the scores are masked between a tanh and its factor", node, advice="cap as cap * tanh(scores / cap), then mask")
        state.scale, state.cap, state.capping = state.scale * factor, factor, False
        return
    if state.cap:
        raise Miss("the scores are scaled after a softcap", node, advice="scale the scores (or the queries) before the softcap")
    if factor <= 0.0 and state.masks:
        raise Miss("the scores are scaled after a mask by a number that is not positive", node, advice="scale them before masking")
    state.scale *= factor
    for term in state.masks:
        # Excluded scores are multiplied too: the lowest number times a small factor may no longer hide them.
        term.factor *= factor
        if term.kind is not MaskKind.ADD and term.fill != -math.inf and term.factor < LEAST_FACTOR:
            raise Miss("masked scores are divided by a large number", node, advice="scale the scores before they are masked")


def _other(node: fx.Node, carried: fx.Node) -> object:
    return node.args[1] if node.args[0] is carried else node.args[0]


def is_single(item: object) -> TypeGuard[fx.Node]:
    """Return whether an operand is one number for all scores, known only at run time: a float, or a float tensor of one element."""
    if not isinstance(item, fx.Node):
        return False
    value = value_of(item)
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point and all(isinstance(size, int) and size == 1 for size in value.shape)
    return isinstance(value, torch.SymFloat | float)


def _times(state: Scores, node: fx.Node, factor: Factor) -> None:
    """Record a factor of the scores whose number only a call knows; raises Miss after a softcap or a mask.

    The rewritten graph multiplies the queries by it, so before any softcap and mask.
    """
    if state.cap or state.capping:
        raise Miss(
            "the scores are scaled by a tensor after or within a softcap", node,
            advice="give the cap as a Python number, and scale the scores (or the queries) before it",
        )
    if state.masks or state.sinks is not None:
        raise Miss(
            "the scores are scaled, after they were masked, by a number that only the call knows", node,
            advice="scale the scores (or the queries) before they are masked",
        )
    # As a mask, the second product would have to be multiplied too.
    state.instead = None
    state.factors.append(factor)


def _mul(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    other = _other(node, carried)
    factor = constant(other)
    if factor is None and is_single(other):
        _times(state, node, Factor(other))
        return
    if factor is None:
        raise Miss("the scores are multiplied by a tensor", node, advice="multiply the queries by it, before the product")
    _scaled(state, node, factor)


def _div(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    factor = constant(node.args[1])
    if factor is None and node.args[0] is carried and is_single(node.args[1]) and "rounding_mode" not in node.kwargs:
        _times(state, node, Factor(node.args[1], divides=True))
        return
    if factor is None or node.args[0] is not carried:
        raise Miss("the scores are divided by a tensor", node, advice="divide by a plain number (math.sqrt), or divide the queries")
    _scaled(state, node, 1 / factor)


def _tanh(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    del carried
    if state.masks or state.cap or state.capping:
        raise Miss("a tanh over masked or capped scores", node, advice="cap the scores once, before masking them")
    state.capping = True


def _add(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    other = _other(node, carried)
    value = constant(other)
    if value == 0.0:
        return
    if not is_tensor(other):
        raise Miss("a number is added to the scores", node, advice="leave it out: the softmax does not see it")
    factor = float(bind(node).get("alpha", 1))
    more = summand(other, state.product) if _bare(state) and factor == 1.0 else None
    if more is not None:
        state.beside = replace(more, factor=more.factor / state.scale)
        state.mask(other, MaskKind.ADD, 1 / state.scale, value_of(node).dtype)
        state.instead = state.masks.pop()
        return
    if other is node.args[0] and factor != 1.0:
        raise Miss("the scores are added to a mask times a number", node, advice="scale the scores before they are added")
    state.mask(other, MaskKind.ADD, factor, value_of(node).dtype)


def _bare(state: Scores) -> bool:
    """Return whether no step but multiplications by numbers has been applied to the scores yet."""
    whole = state.dims == tuple((letter,) if letter else () for letter in state.product.letters)
    return whole and not state.masks and not state.cap and not state.capping and state.beside is None and not state.factors


def _fill(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    del carried
    state.mask(node.args[1], MaskKind.FILL, 1.0, value_of(node).dtype, _filled(state, node, node.args[2]))  # type: ignore[arg-type]


def _where(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    condition, yes, no = node.args[:3]
    kind, value = (MaskKind.BOOL, no) if yes is carried else (MaskKind.FILL, yes)
    state.mask(condition, kind, 1.0, value_of(node).dtype, _filled(state, node, value))  # type: ignore[arg-type]


def _filled(state: Scores, node: fx.Node, item: object) -> float:
    """Return the number that replaces masked scores, rounded to their dtype.

    Raises Miss if that number does not hide a token, or if another mask came before and the number is not the lowest of the dtype.
    """
    value, dtype = constant(item), value_of(node).dtype
    if value is None or not value <= MASKING:
        raise Miss("masked scores are filled with a value that does not exclude them", node, advice=PLAIN)
    value = cast(value, dtype)
    # Biases added before are replaced as well; ``mask.masks`` decides whether that can be expressed.
    if value > lowest(dtype) and any(term.kind is not MaskKind.ADD for term in state.masks):
        raise Miss(
            f"scores are masked a second time, by {value:g}, {SEEN}", node, advice=f"mask them once, or {UNSEEN}",
        )
    return value


def _sinks(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    """Record a column of sinks that is concatenated to the scores; raises Miss for any other concatenation."""
    operands = list(node.args[0])  # type: ignore[arg-type]
    other = operands[1] if operands[0] is carried else operands[0]
    last = int(bind(node)["dim"]) % len(sizes(node)) == len(sizes(node)) - 1
    if not last or sizes(other)[-1] != 1 or sizes(node)[-1] != sizes(carried)[-1] + 1:
        raise Miss(
            "the scores are concatenated with more than one extra column", node,
            advice="write the new tokens into the cache and attend over it in one product",
        )
    state.sinks, state.sinks_first, state.sink_dims = other, operands[0] is not carried, (*state.dims[:-1], ())


def _shifted(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    """Skip the subtraction of the scores' own maximum, or record a mask that is subtracted; raises Miss for any other subtraction."""
    other = node.args[1]
    while isinstance(other, fx.Node) and op_name(other) in COPIES | {"getitem", "unsqueeze"}:
        other = other.args[0]
    term, alpha = node.args[1], float(bind(node).get("alpha", 1))
    if node.args[0] is carried and alpha == 1.0 and op_name(other) in {"amax", "max"} and other.args[0] is carried:  # type: ignore[union-attr]
        return
    if node.args[0] is not carried or not is_tensor(term) or sizes(term)[-1] != sizes(node)[-1]:
        raise Miss(
            "something other than their maximum or a mask is subtracted from the scores", node,
            advice="subtract the maximum of these very scores, or a mask over the tokens",
        )
    state.mask(term, MaskKind.ADD, -alpha, value_of(node).dtype)


def _floor(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    """Skip a clamp to the range of the scores' dtype, which changes no score; raises Miss for any other clamp."""
    del state, carried
    arguments, least = bind(node), lowest(value_of(node).dtype)
    bottom = arguments["min"] if "min" in arguments else node.args[1]
    limits = (bottom, 1.0), (arguments.get("max"), -1.0)
    for limit, sign in limits:
        value = constant(limit)
        if limit is not None and (value is None or value * sign > least):
            raise Miss("the scores are clamped", node, advice="clamp the queries, or use a softcap: cap * tanh(scores / cap)")


def viewed(letters: Letters, dims: Dims, node: fx.Node) -> Dims:
    """Return the dims, in ``letters``, of scores or weights with ``dims`` after the reshape or permutation ``node``.

    Raises Miss where a reshape would mix letters.
    """
    if op_name(node) in RESHAPES:
        return letters.reshaped(dims, sizes(operand(node)), sizes(node), node)
    rank = len(dims)
    arguments = bind(node)
    order = list(range(rank))
    if op_name(node) == "permute":
        order = [int(dim) % rank for dim in arguments["dims"]]
    else:
        a, b = (int(arguments["dim0"]) % rank, int(arguments["dim1"]) % rank) if "dim0" in arguments else (rank - 2, rank - 1)
        order[a], order[b] = order[b], order[a]
    return tuple(dims[dim] for dim in order)


def _viewed(state: Scores, node: fx.Node, carried: fx.Node) -> None:
    del carried
    if state.sinks is not None:
        raise Miss("the scores are reshaped with the sinks' column in them", node, advice="reshape before the sinks are concatenated")
    state.dims = viewed(state.letters, state.dims, node)


SCORE_STEPS: dict[str, Callable[[Scores, fx.Node, fx.Node], None]] = {
    "mul": _mul, "mul_": _mul, "div": _div, "div_": _div, "true_divide": _div, "tanh": _tanh, "add": _add, "add_": _add,
    "masked_fill": _fill, "masked_fill_": _fill, "where": _where, "cat": _sinks, "sub": _shifted, "sub_": _shifted,
    "max": _floor, "maximum": _floor, "clamp": _floor, "clamp_min": _floor,
    **dict.fromkeys(RESHAPES | TURNS, _viewed),
}
