"""Retrace: run Dynamo's graph so that ``make_fx`` records it as ATen, normalised for the matcher.

Five kinds of call are recorded in another form with an equal result: ``expose`` of a compressed cache as the cache itself, so that
aliases stay visible; flex attention and ``varlen_attn`` over caches as plain operations; ``vmap`` regions as ATen; and
``zeros_like(scores)`` and its kin as constructors from sizes, so that a node which only needs a shape does not count as a reader.

Calls on wrapper subclasses (sharded, quantized tensors) stay as Dynamo has them. Nodes that only compute an unread block mask are
skipped.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.capture import flex, varlen
from kvcompile.passes.capture.subclasses import calls_on_composed, record_as_written
from kvcompile.passes.capture.trace_cache import TraceCache
from kvcompile.passes.capture.vmap import VmapRegion, regions
from kvcompile.passes.graph.shapes import source_line

SHAPED: dict[Any, Callable[..., torch.Tensor]] = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones, torch.full_like: torch.full}
"""Constructors from another tensor's sizes, and the equivalent constructors from sizes."""


class Retrace(fx.Interpreter):
    """Interpreter of Dynamo's graph under ``make_fx``.

    ``spell_out``: record flex attention as plain operations, or raise ``flex.Stays``. ``trace_cache``: calls traced before, whose nodes may
    be repeated; None without.
    """

    def __init__(self, module: fx.GraphModule, spell_out: bool = True, trace_cache: TraceCache | None = None) -> None:
        super().__init__(module)
        # Autocast regions change what a call records, and the cache's keys do not contain them.
        self.trace_cache = trace_cache if not any("autocast" in str(node.target) for node in module.graph.nodes) else None
        found = regions(module.graph)
        self.spell_out = spell_out and any(flex.is_flex(node.target) for node in module.graph.nodes)
        self.left_out = unread(module.graph, found) if self.spell_out else set()
        self.used: set[int] = set()
        self.packed = False
        self.as_written = calls_on_composed(module.graph)
        # Traced before the run starts: make_fx must not be nested in another trace.
        self.mapped: dict[fx.Node, tuple[VmapRegion, fx.GraphModule]] = {}
        for region in found:
            if region.nodes[0] not in self.left_out:
                traced = region.traced(module)
                self.mapped.update(dict.fromkeys(region.nodes, (region, traced)))
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and return its result; None for a node that is left out.

        A vmap region runs whole at its first node; its other nodes return stored results. Raises Unsupported for a write in place by a call
        on wrapper subclasses.
        """
        if n in self.left_out:
            return None
        if n in self.mapped:
            region, traced = self.mapped[n]
            if n is region.nodes[0]:
                values = fx.Interpreter(traced).run(*[self.env[node] for node in region.inputs])
                self.results.update(zip(region.outputs, values, strict=True))
            return self.results.pop(n, None)
        self.packed = varlen.over_a_cache(n)
        if self.spell_out and flex.is_flex(n.target):
            self.used = {int(user.args[1]) for user in n.users if user not in self.left_out}  # type: ignore[arg-type]
        if n in self.as_written:
            if _writes(n):
                raise Unsupported(
                    expected="no in-place writes by calls on sharded or quantized tensors (subclasses made of other tensors)",
                    found=str(n.target), where=source_line(n), todo="compute a new tensor there",
                )
            return record_as_written(self, n)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function call and return its result; it is recorded in the form that the matcher recognises.

        Raises flex.Stays for flex attention that has no such form.
        """
        if getattr(target, "overloadpacket", target) is torch.ops.kvcompile.expose:
            return args[0]
        if self.spell_out and flex.is_flex(target):
            try:
                return flex.explicit(self.used, *args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise flex.Stays from error
        if self.packed:
            return varlen.explicit(*args, **kwargs)
        if target in SHAPED and set(kwargs) <= {"dtype", "device"} and args and args[0].is_contiguous():
            like, *fill = args
            if len(fill) == (target is torch.full_like):
                return SHAPED[target](like.shape, *fill, **{"dtype": like.dtype, "device": like.device, **kwargs})
        run = functools.partial(super().call_function, target, args, kwargs)
        return self.trace_cache.call("function", target, args, kwargs, run) if self.trace_cache is not None else run()

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one method call of a tensor and return its result."""
        run = functools.partial(super().call_method, target, args, kwargs)
        return self.trace_cache.call("method", target, args, kwargs, run) if self.trace_cache is not None else run()


def unexposed(module: fx.GraphModule) -> fx.GraphModule:
    """Remove ``expose`` calls from ``module`` in place and return it: a graph for dense tensors where compressed caches were traced."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if getattr(node.target, "overloadpacket", node.target) is torch.ops.kvcompile.expose:
                node.replace_all_uses_with(node.args[0])
                part.graph.erase_node(node)
        part.recompile()
    return module


def unread(graph: fx.Graph, mapped: list[VmapRegion]) -> set[fx.Node]:
    """Return the nodes that only flex attention's block lists read: whole ``vmap`` regions, and single calls without side effects."""
    by_last = {region.nodes[-1]: region for region in mapped}
    inside = {node for region in mapped for node in region.nodes}
    found: set[fx.Node] = set()

    def gone(users: Iterable[fx.Node], node: fx.Node) -> bool:
        return all(user in found or (flex.is_flex(user.target) and node not in flex.operands(user)) for user in users)

    for node in reversed(list(graph.nodes)):
        if node in by_last:
            own = set(by_last[node].nodes)
            kept = any(_writes(item) and item.args[0] in by_last[node].inputs for item in own)
            if not kept and all(gone([user for user in item.users if user not in own], item) for item in by_last[node].outputs):
                found |= own
        elif node.op in {"call_function", "call_method"} and node not in inside and not _writes(node) and gone(node.users, node):
            found.add(node)
    return found


def _writes(node: fx.Node) -> bool:
    """Return whether a call may have side effects, judged by torch's naming (a trailing underscore, ``out=``) and by FX."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "")
    impure = node.op == "call_function" and node.is_impure()
    return node.target is operator.setitem or name.endswith("_") or "out" in node.kwargs or impure
