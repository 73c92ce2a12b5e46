"""Soundness: no operand changes before the rewritten graph reads it, and no inner value of an attention is used elsewhere.

The captured graph is not functional. The rewritten graph reads every operand of an attention where its result is made, and the new tokens
where they are written; a tensor written in place before that would be read with its later values. And the scores and weights of an
attention do not exist after the rewrite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from kvcompile.passes.graph.effects import Effects, written_arguments
from kvcompile.passes.graph.operators import COPIES, SIZES
from kvcompile.passes.graph.pullback import trace
from kvcompile.passes.graph.shapes import is_tensor, op_name
from kvcompile.passes.match.sites import Attention, Miss, Write

STATISTICS = COPIES | {"max", "amax", "logsumexp", "getitem", "sum", "unsqueeze", "squeeze"}


def _first_use(node: fx.Node, nodes: Iterable[fx.Node], effects: Effects) -> fx.Node | None:
    users = [user for user in nodes if node in user.all_input_nodes]
    return min(users, key=lambda user: effects.order[user], default=None)


def unchanged_operands(attention: Attention, effects: Effects) -> None:
    """Raise Miss where queries, a mask, a factor or the sinks are written in place while the attention is computed."""
    named = [("queries", attention.q), *(("a mask", term.node) for term in attention.masks)]
    if attention.beside is not None:
        named.append(("queries", attention.beside.q))
    if attention.sinks is not None:
        named.append(("sinks", attention.sinks))
    named += [("a factor of the scores", factor.node) for factor in attention.factors if is_tensor(factor.node)]
    for name, node in named:
        used = _first_use(node, attention.nodes, effects)
        if used is None:
            continue
        changed = effects.writes_between(node, used, attention.output)
        if set(changed) - set(attention.nodes):
            raise Miss(
                f"the attention reads {name}, changed in place by {op_name(changed[0])} before the attention is complete", changed[0],
                advice="change a copy (x = x * 2 rather than x *= 2), or change it after the attention",
            )


def unchanged_write(write: Write, attention: fx.Node, effects: Effects) -> None:
    """Raise Miss where the written values change between the write and the attention, or the write's positions before it."""
    changed = effects.writes_between(write.values, write.node, attention)
    if changed and write.node not in changed:
        raise Miss(
            f"the written values are changed in place by {op_name(changed[0])} between the write and the attention", changed[0],
            advice="change a copy of them (k = k + 1 rather than k += 1)",
        )
    index = write.position.index
    if index is not None and (changed := effects.writes_between(index, index, write.node)):
        raise Miss(
            f"the write's positions are changed in place by {op_name(changed[0])} before the write", changed[0],
            advice="compute the positions as a new tensor (pos = pos + 1)",
        )


def private(attention: Attention, effects: Effects) -> None:
    """Raise Miss if nodes other than the attention's own steps read its scores or weights, or change them in place."""
    nodes = set(attention.nodes)
    for node in attention.nodes:
        if node in attention.results:
            continue
        for user in node.users:
            if not _inside(user, nodes):
                raise Miss(
                    f"the scores or weights of the attention are also read by {op_name(user) or user.op}", user,
                    advice="compute what is read from the queries instead, or leave it out when decoding",
                )
        for write in effects.writes_to(node):
            if write not in nodes and is_tensor(node):
                raise Miss(
                    f"the scores or weights of the attention are changed in place by {op_name(write)}", write,
                    advice="use masked_fill, where or an added mask over all scores",
                )


def early_readers(attention: Attention, effects: Effects) -> tuple[fx.Node, ...]:
    """Return the nodes computed from the log-sums before the attention's output, in order; raises Miss where they cannot move after it.

    The rewritten operation computes both results at once, where the output was computed. Empty for an attention without log-sums.
    """
    log = attention.log_sums
    if log is None:
        return ()
    order, last = effects.order, effects.order[attention.output]
    found: dict[fx.Node, None] = {}
    stack = [log]
    while stack:
        for user in stack.pop().users:
            if order[user] < last and user not in attention.nodes and user not in found:
                found[user] = None
                stack.append(user)
    for node in found:
        given = [item for item in node.all_input_nodes if is_tensor(item)]
        if any(effects.writes_between(item, node, attention.output) for item in given) or written_arguments(node) or node.is_impure():
            raise Miss(
                f"the scores' log-sum is read by {op_name(node) or node.op} before the attention is complete, among writes in place", node,
                advice="read the log-sum after the product of weights and values",
            )
    return tuple(sorted(found, key=order.__getitem__))


def one_sink_a_head(attention: Attention) -> None:
    """Raise Miss where a sink logit depends on the batch row or on the token."""
    if attention.sinks is None:
        return
    roles = attention.sink_roles
    trail = trace(attention.sinks, lambda node: False)
    heads = [dim for dim, role in enumerate(roles) if role and not set(role) - set("HKG")]
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for here, there in zip(trail.here, trail.there, strict=True):
        if seen.setdefault(tuple(here[heads]), tuple(there)) != tuple(there):
            raise Miss("the sinks depend on the batch row or the token", attention.sinks, advice="give every head one sink logit")


def _inside(user: fx.Node, nodes: set[fx.Node], depth: int = 6) -> bool:
    """Return whether ``user`` is a step of the attention, or a statistic of its scores that only its steps read."""
    if user in nodes or op_name(user) in SIZES:
        return True
    if depth == 0 or op_name(user) not in STATISTICS or written_arguments(user):
        return False
    return all(_inside(item, nodes, depth - 1) for item in user.users)


def unchanged_since(node: fx.Node, reader: fx.Node, effects: Effects, known: Collection[fx.Node] = ()) -> bool:
    """Return whether neither ``node`` nor any tensor that it is computed from is written to in place before it is read.

    ``reader`` is the node that reads ``node``; tensors in ``known`` are not checked.
    """
    stack, seen = [(node, reader)], set()
    while stack:
        item, user = stack.pop()
        if (item, user) in seen or not is_tensor(item) or item in known:
            continue
        seen.add((item, user))
        if effects.writes_between(item, item, user):
            return False
        stack += [(operand, item) for operand in item.all_input_nodes]
    return True
