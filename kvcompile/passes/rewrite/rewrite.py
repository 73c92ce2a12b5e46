"""Rewrite: every planned site becomes ``kvcompile::append`` and ``kvcompile::attend`` (or its scheme's own attention) on store planes.

With ``certify`` and a scheme without a certificate, ``kvcompile::report_site`` follows ``attend`` and adds to the keys' last plane. The
planes are new placeholders after the old ones; the cache tensor itself leaves the graph. There are two variants of a graph, because
the host knows before the call whether anything is cached, and choosing needs neither a recompile nor a branch on the device:

PAST    attention reads the store, after the new tokens are appended
FRESH   the store is empty: attention reads the new keys and values in full precision, by flash attention if the mask is causal, and the
        store is only written
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.appends import Appends
from kvcompile.passes.rewrite.attend import Shared, attend
from kvcompile.passes.rewrite.cleanup import detach_sizes, drop_outputs, erase_caches, erase_dead
from kvcompile.passes.rewrite.context import Context
from kvcompile.passes.rewrite.paged import PagedCaches
from kvcompile.passes.rewrite.planes import Planes
from kvcompile.passes.rewrite.reads import check_reads
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.passes.rewrite.rope import RopeTables
from kvcompile.passes.rewrite.sliding import SlidingCaches
from kvcompile.passes.rewrite.symbols import Symbols


def rewrite(captured: Captured, plan: Plan, variant: Variant, effects: Effects) -> Rewritten:
    """Return the rewritten graph of one variant; the captured graph is unchanged. Raises Unsupported as ``check_reads``."""
    context, output = _copied(captured, plan, variant, effects)
    planes, sliding = Planes(context), SlidingCaches(context.graph)
    rope = RopeTables(planes, all_empty=variant is Variant.FRESH)
    appends = Appends(context, planes, rope, sliding, PagedCaches(effects))
    # In the order of the writes: positions that one append computes must precede the next append.
    for slot in sorted(context.slots(), key=lambda slot: effects.order[slot.slot.write.at]):
        planes.of(slot)
        if slot.slot.kind.facts.written and not context.is_calibrated(slot):
            appends.append(slot)
    for item in plan.sites:
        attend(Shared(context, planes, rope, sliding, appends), item)
    detach_sizes(context)
    dropped = tuple(sorted({index for binding in planes.bindings for index in binding.outputs}))
    results = drop_outputs(context, output, dropped)
    erase_dead(context)
    cursors = sliding.finalize()
    kept = erase_caches(context)
    sizes = context.symbols.finalize()
    module = fx.GraphModule(captured.module, context.graph)
    context.graph.lint()
    check_reads(context)
    return Rewritten(module, variant, kept, tuple(planes.bindings), dropped, results, cursors, sizes)


def _copied(captured: Captured, plan: Plan, variant: Variant, effects: Effects) -> tuple[Context, fx.Node]:
    """Return (context, output node) of a copy of the captured graph."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(captured.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    caches = {slot.placeholder for item in plan.sites for slot in item.site.slots}
    symbols = Symbols(captured, graph, copies, caches)
    return Context(captured, plan, variant, effects, graph, copies, symbols), output
