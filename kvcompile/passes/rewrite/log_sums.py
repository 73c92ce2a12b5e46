"""Log-sums: the second result of an attention, one more channel in the result of ``attend``.

::

    l = logsumexp(scores, -1)            both = attend(q, ..., log_sums=True)        [B, H, S, Dv + 1]
    out = softmax(scores, -1) @ v   ->   out, l = both[..., :-1], both[..., -1]
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.soundness import early_readers
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.passes.rewrite.context import Context
from kvcompile.passes.rewrite.sources import Sources


def apart(emit: Emitter, both: fx.Node, source: Sources) -> tuple[fx.Node, fx.Node]:
    """Return (output [B, H, S, Dv] in the queries' dtype, log-sums [B, H, S, 1]) of ``both``, a result of ``attend`` with log-sums."""
    width = source.value_dim
    out, log = (emit.call(aten.slice.Tensor, both, 3, start, start + count) for start, count in ((0, width), (width, 1)))
    return emit.call(aten.to.dtype, out, source.dtype), log


def replace(context: Context, emit: Emitter, item: SitePlan, log: fx.Node) -> None:
    """Replace a site's log-sums by ``log`` [B, H, S, 1], and move nodes that read them before the new attention to after it."""
    site, old = item.site, item.site.attention.log_sums
    assert old is not None
    dtype = value_of(old).dtype
    new = emit.from_heads(emit.call(aten.to.dtype, log, dtype), site.attention.log_sum_roles, site.heads, site.groups)
    last = new
    for node in early_readers(site.attention, context.effects):
        moved = context.copies[node]
        last.append(moved)
        last = moved
    context.copies[old].replace_all_uses_with(new)
    context.copies[old] = new
