"""Log-sums of the scores, read in addition to their softmax: for sinks applied after the attention, or as a second result.

    softmax(x) @ v * sigmoid(logsumexp(x) - sink)    is    softmax([x, sink])[..., :-1] @ v

because both are sum(exp(x) v) / (sum(exp(x)) + exp(sink)). Any other use of a log-sum reads it as the attention's second result
(``Attention.log_sums``), such as the merge of two attentions over parts of the tokens:

    o1 * sigmoid(l1 - l2) + o2 * sigmoid(l2 - l1)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from kvcompile.passes.graph.operators import COPIES, SIZES, TURNS
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, operand, rank, sizes
from kvcompile.passes.match.attention.roles import Dims
from kvcompile.passes.match.attention.steps import RESHAPES, Scores, viewed
from kvcompile.passes.match.sites import MaskKind


@dataclass(frozen=True)
class Rescaled:
    """An attention's result times sigmoid(log-sum - sinks).

    ``output``: the node of the product; the sinks with their dims; and all nodes between the attention and the product.
    """

    output: fx.Node
    sinks: fx.Node
    sink_dims: Dims
    nodes: tuple[fx.Node, ...]


def log_sum(scores: fx.Node, dim: int) -> fx.Node | None:
    """Return the ``logsumexp`` node over dim ``dim`` of ``scores`` or of casts of them; None where there is not exactly one."""
    chain = [scores]
    while op_name(chain[-1]) in COPIES - {"dropout"} and is_tensor(chain[-1].args[0]):
        chain.append(operand(chain[-1]))
    dims = rank(scores)
    # Softmax and log-sum may each have a cast of their own.
    casts = [user for node in chain for user in node.users if op_name(user) in COPIES - {"dropout"}]
    found = [
        user for node in dict.fromkeys((*chain, *casts)) for user in node.users
        if op_name(user) == "logsumexp" and [int(item) % dims for item in bind(user)["dim"]] == [dim]
    ]
    return found[0] if len(found) == 1 else None


def dims_of(log: fx.Node, dim: int, state: Scores) -> Dims:
    """Return the dims of a log-sum over the scores' dim ``dim``, in letters of the scores."""
    return (*state.dims[:dim], *([()] if bind(log)["keepdim"] else []), *state.dims[dim + 1 :])


def rescaled(log: fx.Node, dim: int, state: Scores, result: fx.Node, result_dims: Dims) -> Rescaled | None:
    """Return the multiplication of an attention's ``result`` by sigmoid(log-sum - sinks); None where there is none.

    ``log``: the log-sum of the scores' dim ``dim``; ``result_dims``: the result's dims, in letters of the scores. Raises Miss where a
    reshape mixes letters, or the sinks broadcast over part of a flattened dim.
    """
    dims = dims_of(log, dim, state)
    nodes, node = [log], log
    sinks: fx.Node | None = None
    sink_dims: Dims = ()
    done = False
    while True:
        users = [user for user in node.users if op_name(user) not in SIZES]
        if len(users) != 1:
            return None
        following, name = users[0], op_name(users[0])
        if name in COPIES - {"dropout"}:
            pass
        elif name in RESHAPES | TURNS:
            dims = viewed(state.letters, dims, following)
        elif name == "sub" and sinks is None and following.args[0] is node and is_tensor(following.args[1]):
            if bind(following)["alpha"] != 1 or sizes(following) != sizes(node):
                return None
            sinks = following.args[1]
            sink_dims = state.term(sinks, MaskKind.ADD, dims).dims
        elif name == "sigmoid" and sinks is not None and not done:
            done = True
        elif name == "mul" and done and sinks is not None:
            path = _to_result(following, node, result)
            fits = path is not None and state.letters.split_dims(dims) == result_dims
            return Rescaled(following, sinks, sink_dims, (*nodes, *path, following)) if fits and path is not None else None
        else:
            return None
        nodes.append(following)
        node = following


def _to_result(scaled: fx.Node, factor: fx.Node, result: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the copies between ``result`` and ``scaled``, its product with ``factor``; None if ``scaled`` is another product."""
    node = scaled.args[1] if scaled.args[0] is factor else scaled.args[0]
    nodes: list[fx.Node] = []
    while isinstance(node, fx.Node) and node is not result:
        if op_name(node) not in COPIES:
            return None
        nodes.append(node)
        node = node.args[0]
    return tuple(nodes) if node is result and sizes(scaled) == sizes(result) else None
