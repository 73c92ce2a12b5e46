"""Attention spelled out: product, steps on the scores, softmax, product.

The steps between the two products are read one by one into a normal form (scale, softcap, mask terms,
sinks), so their order and their spelling do not matter where the mathematics does not care.

::

    matmul = matmul(q, transpose(index_copy_(k_cache, 2, pos, new_k), -1, -2))
    scores = masked_fill(div(matmul, 4), bitwise_not(le(arange(T), unsqueeze(pos, 1))), -inf)
    out    = matmul(softmax(scores, -1), index_copy_(v_cache, 2, pos, new_v))
    after:
    append(new_k, k_planes, unsqueeze(pos, 0), "int8"); append(new_v, v_planes, unsqueeze(pos, 0), "int8")
    out    = attend(q, k_planes, v_planes, hi=unsqueeze(pos, 0), lo=None, keep=None, bias=None, "int8", "int8", scale=0.25)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.shapes import op_name, sizes, value_of
from kvcompile.passes.match.attention import weights
from kvcompile.passes.match.attention.behind import Behind, behind, made_of
from kvcompile.passes.match.attention.log_sums import dims_of, log_sum, rescaled
from kvcompile.passes.match.attention.products import Product, product
from kvcompile.passes.match.attention.roles import Dims, Letters, Naming, readings
from kvcompile.passes.match.attention.steps import SCORE_STEPS, Scores, Statistics, Term, scores_operand
from kvcompile.passes.match.attention.sums import beside
from kvcompile.passes.match.sites import Attention, MaskKind, MaskTerm, Miss, Zeroed


def _chain(scores: fx.Node) -> tuple[Product, list[tuple[fx.Node, fx.Node]]]:
    """Return the product that a softmax's scores come from, and the steps between, each with its operand that carries the scores.

    Raises Miss at a node that is not a known step.
    """
    steps: list[tuple[fx.Node, fx.Node]] = []
    node = scores
    while True:
        if not isinstance(node, fx.Node):
            raise Miss("the softmax is over no product of queries and keys", scores, advice="take it over q @ k.transpose(-1, -2)")
        found = product(node)
        if found is not None:
            return found, steps[::-1]
        carried = scores_operand(node)
        if carried is None:
            raise Miss(
                f"the scores pass through {op_name(node) or node.op}, which is no known step of attention", node,
                advice="between the product and the softmax only scale, cap (tanh), mask or add a bias",
            )
        steps.append((node, carried))
        node = carried


def recognise(node: fx.Node) -> Attention | None:
    """Return the attention around the softmax that ``node`` completes; None if there is no softmax.

    Raises Miss if the steps around it are unknown.
    """
    found = weights.read(node)
    if found is None:
        return None
    first, steps = _chain(found.scores)
    letters = Letters()
    for item, spelled in first.operands():
        letters.note(item, spelled)
    state = Scores(first, letters, letters.note(first.node, first.letters), scale=first.alpha, factors=list(first.factors))
    if first.bias is not None:
        state.mask(first.bias, MaskKind.ADD, dtype=value_of(first.node).dtype)
    for step, carried in steps:
        if op_name(step) not in COPIES:
            SCORE_STEPS[op_name(step)](state, step, carried)
    if state.capping:
        raise Miss("a tanh that is not scaled back", node, advice="cap as cap * tanh(scores / cap)")
    for mask, kind in found.masks:
        state.mask(mask, kind)
    tokens = state.dims[found.dim]
    if len(tokens) != 1 or (state.sinks is not None and found.dim != len(state.dims) - 1):
        raise Miss("the softmax is over no single dim of cached tokens", node, advice="take the softmax over the cached tokens, dim=-1")
    statistics: Statistics = ((found.scores, state.dims),)
    zeroed: list[tuple[Term, Statistics]] = [(state.term(mask, kind, state.dims), statistics) for mask, kind in found.zeroed]
    after = behind(node, state.dims, state)
    zeroed += [(term, (*statistics, (given, dims))) for term, given, dims in after.zeroed]
    output = after.product.node
    log = log_sum(found.scores, found.dim) if not found.masks else None
    known = log is not None and state.sinks is None
    scaled = rescaled(log, found.dim, state, output, _result_dims(after, state)) if known and log is not None else None
    if scaled is not None:
        output, state.sinks, state.sink_dims = scaled.output, scaled.sinks, scaled.sink_dims
    more = state.beside.nodes if state.beside is not None else ()
    behind_product = scaled.nodes if scaled is not None else ()
    nodes = (first.node, *more, *(step for step, _ in steps), *found.nodes, *after.path, after.product.node, *behind_product)
    nodes = (*nodes, *made_of([item for step in after.path for item in step.all_input_nodes], nodes))
    if log is not None and scaled is None and not set(log.users) <= set(nodes):
        state.log_sums, state.log_sum_dims = log, dims_of(log, found.dim, state)
        nodes = (*nodes, log)
    key, named = readings(first, letters, tokens[0])
    state.zeroed, state.rounding = zeroed, found.epsilon
    made = list(_attentions(state, first, key, named, after, output, tuple(dict.fromkeys(nodes))))
    if state.instead is not None and not state.cap:
        term = replace(state.instead, factor=state.instead.factor * state.scale)
        plain = replace(state, beside=None, masks=[*state.masks, term])
        without = tuple(dict.fromkeys(item for item in nodes if item not in more))
        made += _attentions(plain, first, key, readings(first, letters, tokens[0])[1], after, output, without)
    return replace(made[0], others=tuple(made[1:]))


def _result_dims(after: Behind, state: Scores) -> Dims:
    """Return the dims of the product with the values, in letters of the scores; () for the values' channels."""
    at = dict(zip(after.product.operands()[after.side][1], after.dims, strict=True))
    return state.letters.split_dims(tuple(at.get(letter, ()) for letter in after.product.letters))


def _attentions(
    state: Scores, first: Product, key: int, named: Iterator[Naming], after: Behind, output: fx.Node, nodes: tuple[fx.Node, ...],
) -> Iterator[Attention]:
    """Yield one attention for every way to name the letters; raises Miss where the second product does not sum over cached tokens."""
    last, side = after.product, after.side
    keys, key_letters = first.operands()[key]
    queries, query_letters = first.operands()[1 - key]
    values, value_letters = last.operands()[1 - side]
    at = dict(zip(last.operands()[side][1], after.dims, strict=True))
    fresh = [letter for letter in value_letters if letter and letter not in at]
    if len(fresh) != 1 or any(letter and letter not in at and letter not in fresh for letter in last.letters):
        raise Miss(
            "the product of weights and values is no sum over the cached tokens", last.node,
            advice="multiply weights [.., S, T] with values [.., T, D]",
        )
    split_dims = state.letters.split_dims

    def spelled(letters: tuple[str, ...]) -> Dims:
        return split_dims(tuple((letter,) if letter else () for letter in letters))

    def placed(letters: tuple[str, ...]) -> Dims:
        return tuple(at.get(letter, ("value channels",)) if letter else () for letter in letters)

    token = next(iter(set(first.operands()[key][1]) & set(first.letters) - set(first.operands()[1 - key][1])), "")
    for reading in named:
        naming = Naming({**reading.names, "value channels": "D"})
        terms = tuple(_term(term, naming, split_dims) for term in state.masks)
        q_roles = naming.roles(spelled(query_letters))
        own = next((letter for letter, role in naming.names.items() if role == "S"), None)
        together = next((size for role, size in zip(q_roles, sizes(queries), strict=True) if "S" in role and len(role) > 1), None)
        folded = together // state.letters.size[own] if together is not None and own is not None else 1
        more = beside(state.beside, first, token, naming) if state.beside is not None else None
        if more is not None and folded > 1:
            raise Miss("a sum of two products over queries whose heads are flattened into the tokens", last.node, advice="keep them apart")
        yield Attention(
            op_name(first.node) + "-softmax-" + op_name(last.node), output, nodes,
            queries, q_roles, keys, naming.roles(spelled(key_letters)), values, naming.roles(placed(value_letters)),
            naming.roles(placed(last.letters)), state.scale, state.cap, terms, False, state.sinks,
            naming.roles(split_dims(state.sink_dims)) if state.sinks is not None else (),
            folded, more,
            tuple(
                Zeroed(_term(term, naming, split_dims), tuple((item, naming.roles(split_dims(dims))) for item, dims in statistics))
                for term, statistics in state.zeroed
            ),
            state.rounding, tuple(state.factors), state.log_sums,
            naming.roles(split_dims(state.log_sum_dims)) if state.log_sums is not None else (),
        )


def _term(term: Term, naming: Naming, split_dims: object) -> MaskTerm:
    """Return a term of the scores' normal form as a mask term, its dims named by roles."""
    factor = term.factor if term.kind is MaskKind.ADD else 1.0
    return MaskTerm(term.node, term.kind, naming.roles(split_dims(term.dims)), factor, term.dtype, term.score)  # type: ignore[operator]
