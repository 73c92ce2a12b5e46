"""Memory: attention over learned tokens in full precision, merged by log-sums with attention over the cached tokens.

::

    attention(q, cat([m_k, k]), cat([m_v, v]))  ->  one, a = attend(q, k_planes, v_planes, log_sums=True)
                                                    two, b = attend(q, [m_k], [m_v], log_sums=True)
                                                    one * exp(a - logaddexp(a, b)) + two * exp(b - logaddexp(a, b))
"""

from __future__ import annotations

import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import size_along
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.context import device_of
from kvcompile.passes.rewrite.log_sums import apart
from kvcompile.passes.rewrite.masks import joined
from kvcompile.passes.rewrite.sources import DENSE, Sources
from kvcompile.types import BESIDE, QUERY_GROUP, QUERY_ROWS


def merged(
    emit: Emitter, item: SitePlan, source: Sources, out: fx.Node, log: fx.Node, like: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Emit the result [B, H, S, Dv] and log-sums [B, H, S, 1] over learned and cached tokens, from ``out`` and ``log`` of the cached ones.

    ``like``: the attention node over cached tokens, with the same rows of queries.
    """
    made = _attend(emit, item, source)
    made.meta |= {BESIDE: True, **{name: like.meta[name] for name in (QUERY_ROWS, QUERY_GROUP)}}
    own, sum_of_own = apart(emit, made, source)
    total = emit.call(aten.logaddexp.default, log, sum_of_own)
    # For a query that sees nothing: e^(-inf - 0) rather than e^(-inf + inf).
    level = emit.call(aten.masked_fill.Scalar, total, emit.call(aten.eq.Scalar, total, float("-inf")), 0.0)
    parts = [
        emit.call(aten.mul.Tensor, result, emit.call(aten.exp.default, emit.call(aten.sub.Tensor, part, level)))
        for result, part in ((out, log), (own, sum_of_own))
    ]
    return emit.call(aten.to.dtype, emit.call(aten.add.Tensor, *parts), source.dtype), total


def _attend(emit: Emitter, item: SitePlan, source: Sources) -> fx.Node:
    """Emit attention over only the learned tokens, with log-sums; learned sinks belong to the attention over cached tokens."""
    attention = item.site.attention
    memory = attention.memory
    assert memory is not None
    keys, values = (
        [_tokens(emit, item, source, *learned)] for learned in (
            (memory.keys, memory.roles[0], item.key.spec.head_dim), (memory.values, memory.roles[1], item.value.spec.head_dim),
        )
    )
    count = size_along(attention.q, attention.q_roles, "S", attention.folded)
    last, mask = emit.constant_limit(count, memory.count - 1, device_of(item)), joined(emit, item, memory.masks, memory.count)
    return emit.call(
        torch.ops.kvcompile.attend.default, source.asked, keys, values, last, None, None, mask, None, DENSE, DENSE, abs(attention.scale),
        attention.softcap, item.value.spec.head_dim, log_sums=True,
    )


def _tokens(emit: Emitter, item: SitePlan, source: Sources, node: fx.Node, roles: tuple[str, ...], head_dim: int) -> fx.Node:
    """Emit the learned keys or values ``node``, with dims of ``roles``, as a plane [1, B, K, m, D] of m tokens; return its node."""
    made, current = emit.apart(emit.copies[node], roles, {"K": item.key.spec.heads, "D": head_dim})
    made = emit.arrange(made, current, ("B", "K", "T", "D"))
    return emit.call(aten.unsqueeze.default, emit.call(aten.to.dtype, made, source.dtype), 0)
