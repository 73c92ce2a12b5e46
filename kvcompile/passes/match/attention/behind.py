"""Steps from a softmax to its product with the values: copies, views, a dropped column of sinks, and weights set to zero.

A query whose tokens are all hidden has weights of NaN, or equal weights where finite numbers hide the tokens. Models set them to zero:

    softmax(x).nan_to_num()         where(seen.any(-1), softmax(x), 0)        softmax(x).masked_fill(hidden, 0)
    softmax(x) * seen               where(all(x == -inf), 0, softmax(x)), which is how torch.export decomposes SDPA

``kvcompile::attend`` gives zero for such a query by definition. ``match.mask.zeroed`` checks that a step sets no other weight to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES, SIZES, TURNS
from kvcompile.passes.graph.shapes import bind, op_name, operand, rank, same_shape, sizes
from kvcompile.passes.match.attention.products import Product, product
from kvcompile.passes.match.attention.roles import Dims
from kvcompile.passes.match.attention.steps import RESHAPES, Scores, Term, viewed
from kvcompile.passes.match.attention.weights import masked
from kvcompile.passes.match.sites import Miss

TESTS = frozenset({"isnan", "ne", "eq", "full_like", "zeros_like", "isinf", "isfinite"})
"""Operators that read weights only to find where to put zeros."""


@dataclass(frozen=True)
class Behind:
    """The nodes (``path``) from a softmax to its ``product`` with the values.

    ``side``: the index of the weights among the product's operands; ``dims``: their dims there. ``zeroed``: each mask that sets weights to
    zero, with the weights that it masks and their dims.
    """

    path: tuple[fx.Node, ...]
    product: Product
    side: int
    dims: Dims
    zeroed: tuple[tuple[Term, fx.Node, Dims], ...]


def behind(start: fx.Node, dims: Dims, state: Scores) -> Behind:
    """Return the steps from the softmax ``start``, of dims ``dims``, to the product with the values; raises Miss for other uses of it."""
    node, dropped = start, state.sinks is None
    path: list[fx.Node] = []
    zeroed: list[tuple[Term, fx.Node, Dims]] = []
    while True:
        user = _next(node)
        found = product(user)
        if found is not None and found.bias is None:
            sides = [side for side, (item, _) in enumerate(found.operands()) if item is node]
            if len(sides) == 1:
                if not dropped:
                    raise Miss("the sinks' column is not dropped before the values", node, advice="drop it with probs[..., :-1]")
                return Behind(tuple(path), found, sides[0], state.letters.split_dims(dims), tuple(zeroed))
        name = op_name(user)
        path.append(user)
        zeros = masked(user)
        if name == "slice" and not dropped and _drops_sinks(user, state):
            dropped = True
        elif name in RESHAPES | TURNS:
            dims = viewed(state.letters, dims, user)
        elif zeros is not None and zeros[0] is node and sizes(user) == sizes(node):
            zeroed.append((state.term(zeros[1], zeros[2], dims), node, dims))
        elif not _keeps(user, name):
            raise Miss(
                f"the attention weights pass through {name or user.op} before the values", user,
                advice="multiply the softmax's result with the values as it is",
            )
        node = user


def _next(node: fx.Node) -> fx.Node:
    """Return the one node that reads the weights ``node``; raises Miss if several nodes read them."""
    users = [user for user in node.users if op_name(user) not in SIZES]
    if len(users) > 1:
        users = [user for user in users if op_name(user) not in TESTS]
    if len(users) != 1:
        raise Miss(
            "the attention weights are read by more than the product with the values", node,
            advice="do not return or measure the weights when decoding",
        )
    return users[0]


def _keeps(node: fx.Node, name: str) -> bool:
    """Return whether a node, by an operator called ``name``, returns the attention weights that it reads unchanged.

    ``nan_to_num`` with zeros counts, since only the weights of a query that sees no token are NaN; so does a dropout that drops nothing.
    """
    if name == "dropout":
        return bool(node.args[1] == 0.0 or not node.args[2])
    if name == "nan_to_num":
        return not constant(node.args[1] if len(node.args) > 1 and node.args[1] is not None else 0.0)
    if name in {"expand", "expand_as", "broadcast_to"}:
        return same_shape(node, operand(node))
    return name in COPIES


def _drops_sinks(node: fx.Node, state: Scores) -> bool:
    """Return whether a slice drops the column of sinks from the weights, and no other column."""
    arguments = bind(node)
    before, after = sizes(node.args[0])[-1], sizes(node)[-1]  # type: ignore[arg-type]
    start = 1 if state.sinks_first else 0
    last = int(arguments["dim"]) % rank(node) == rank(node) - 1
    return last and after == before - 1 and (arguments.get("start") or 0) == start


def made_of(roots: Iterable[fx.Node], chain: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield, in graph order, the nodes outside of ``chain`` that lie between ``chain`` and ``roots`` in the dataflow.

    For example, the nodes of a mask that is computed from the scores.
    """
    stop = set(chain)
    first = min(stop)
    order: list[fx.Node] = []
    stack, seen = list(roots), set[fx.Node]()
    while stack:
        node = stack.pop()
        # Nodes before the chain's first node cannot depend on it.
        if node in seen or node in stop or node < first:
            continue
        seen.add(node)
        order.append(node)
        stack += node.all_input_nodes
    reached = set(stop)
    for node in sorted(order):
        if any(item in reached for item in node.all_input_nodes):
            reached.add(node)
            yield node
