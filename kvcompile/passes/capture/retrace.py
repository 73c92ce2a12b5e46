"""Retrace: Dynamo's graph, run once more so that ATen records it, in the forms that recognisers read.

Four things are said otherwise than Dynamo has them, each with the same result: a compressed cache instead of its
``expose``, so that aliases are seen; flex attention as plain operations; regions under ``vmap`` as ATen; and
``zeros_like(scores)`` and its kin by their sizes, since what only asks for a shape reads nothing.

Calls on tensors that are made of others stay calls of Dynamo's. What made a block mask that is then not read is left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from kvcompile.errors import Unsupported
from kvcompile.passes.capture import flex
from kvcompile.passes.capture.subclasses import calls_on_composed, record_as_written
from kvcompile.passes.capture.trace_cache import TraceCache
from kvcompile.passes.capture.vmap import VmapRegion, regions
from kvcompile.passes.graph.shapes import source_line

SHAPED: dict[Any, Callable[..., torch.Tensor]] = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones, torch.full_like: torch.full}
"""Makers of a tensor of another's sizes, and those that take sizes."""


class Retrace(fx.Interpreter):
    """Runs Dynamo's graph under ``make_fx``; ``spell_out``: flex attention as plain operations, or ``flex.Stays`` is raised."""

    def __init__(self, module: fx.GraphModule, spell_out: bool = True, trace_cache: TraceCache | None = None) -> None:
        super().__init__(module)
        # Regions of autocast change what a call becomes, and no key knows of them.
        self.trace_cache = trace_cache if not any("autocast" in str(node.target) for node in module.graph.nodes) else None
        found = regions(module.graph)
        self.spell_out = spell_out and any(flex.is_flex(node.target) for node in module.graph.nodes)
        self.left_out = unread(module.graph, found) if self.spell_out else set()
        self.used: set[int] = set()
        self.as_written = calls_on_composed(module.graph)
        # Traced here: no other trace may be going on.
        self.mapped: dict[fx.Node, tuple[VmapRegion, fx.GraphModule]] = {}
        for region in found:
            if region.nodes[0] not in self.left_out:
                traced = region.traced(module)
                self.mapped.update(dict.fromkeys(region.nodes, (region, traced)))
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """One node; a region's at its first."""
        if n in self.left_out:
            return None
        if n in self.mapped:
            region, traced = self.mapped[n]
            if n is region.nodes[0]:
                values = fx.Interpreter(traced).run(*[self.env[node] for node in region.inputs])
                self.results.update(zip(region.outputs, values, strict=True))
            return self.results.pop(n, None)
        if self.spell_out and flex.is_flex(n.target):
            self.used = {int(user.args[1]) for user in n.users if user not in self.left_out}  # type: ignore[arg-type]
        if n in self.as_written:
            if _writes(n):
                raise Unsupported(
                    expected="calls on tensors that are made of others (sharded, quantized) to write to none in place",
                    found=str(n.target), where=source_line(n), todo="compute a new tensor there",
                )
            return record_as_written(self, n)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call, in the form that recognisers read."""
        if getattr(target, "overloadpacket", target) is torch.ops.kvcompile.expose:
            return args[0]
        if self.spell_out and flex.is_flex(target):
            try:
                return flex.explicit(self.used, *args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise flex.Stays from error
        if target in SHAPED and set(kwargs) <= {"dtype", "device"} and args and args[0].is_contiguous():
            like, *fill = args
            if len(fill) == (target is torch.full_like):
                return SHAPED[target](like.shape, *fill, **{"dtype": like.dtype, "device": like.device, **kwargs})
        run = functools.partial(super().call_function, target, args, kwargs)
        return self.trace_cache.call("function", target, args, kwargs, run) if self.trace_cache is not None else run()

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a tensor's method."""
        run = functools.partial(super().call_method, target, args, kwargs)
        return self.trace_cache.call("method", target, args, kwargs, run) if self.trace_cache is not None else run()


def unexposed(module: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph, changed in place so that it takes dense tensors where it was traced for compressed caches."""
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
    """The calls whose results nothing reads once flex attention is spelled out: whole regions, and calls without effects."""
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
    """Whether a call may do more than give a result, by the name that torch gives to such calls."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "")
    impure = node.op == "call_function" and node.is_impure()
    return node.target is operator.setitem or name.endswith("_") or "out" in node.kwargs or impure
