"""Inputs of a rewritten graph: fake values to compile it with, and the marks that AOTAutograd and CUDA graphs look for."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic

from kvcompile.passes.capture.attributes import STATIC
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.dynamo import ConstantSource
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.graph.worlds import empty_when_captured
from kvcompile.passes.plan.plan import Growing
from kvcompile.passes.rewrite.rewritten import Rewritten
from kvcompile.types import Extent

log = logging.getLogger(__name__)

NOT_EMPTY = 2
"""The hint of an int that is 0 in the captured call."""
PAGES_HINT = 64
"""Pages of a store that the compiler may assume where it must choose."""


def rewritten_inputs(captured: Captured, rewritten: Rewritten) -> tuple[tuple[Any, ...], dict[Any, str]]:
    """(fake values of the rewritten graph's inputs, a name for each symbol of ours): stores that grow alike share one number of pages."""
    mode = captured.fake_mode
    pages: dict[Growing, Any] = {}
    symbols: dict[Any, str] = {}
    planes = []
    for growing in dict.fromkeys(item.plan.growing for item in rewritten.bindings):
        label = growing.label
        pages[growing] = _length(mode, rewritten.variant.value + (f"_{label}" if label else ""), symbols, label)
    with mode:
        for item in rewritten.bindings:
            slot = item.plan.slot
            root = value_of(slot.root)
            batch = slot.rows(root.shape)
            for place, spec in enumerate(item.plan.layout.planes):
                shape = spec.shape(pages[item.plan.growing], batch, item.plan.spec.heads)
                if item.plan.layout.first is not None and (spec.extent is Extent.STORE or spec.extent is Extent.TOKENS):
                    # Every such plane has a length of its own.
                    name = f"plane{item.first_plane + place}"
                    shape = spec.shape_of(_length(mode, f"{rewritten.variant.value}_{name}", symbols, name), batch, item.plan.spec.heads)
                planes.append(torch.empty(shape, dtype=spec.dtype, device=root.device))
        planes += [torch.empty(1, dtype=torch.int64, device=planes[0].device) for _ in rewritten.cursors]
    sizes = [_symint(mode, symbol) for symbol in rewritten.sizes]
    return (*[_canonical(mode, captured.fakes[index]) for index in rewritten.kept], *planes, *sizes), symbols


def _length(mode: Any, name: str, symbols: dict[Any, str], label: str) -> Any:
    """The length of planes along their first axis: a new symbol of that name, entered into ``symbols`` under its label.

    Named by the variant, not counted: a graph has a shape environment of its own, and a name that depended on what was compiled before
    would miss Inductor's cache on disk.
    """
    if mode.shape_env is None:
        return PAGES_HINT
    source = ConstantSource(f"kvcompile_pages_{name}")
    symbol = mode.shape_env.create_symbol(PAGES_HINT, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    symbols[symbol] = f"N{label}"
    return mode.shape_env.create_symintnode(symbol, hint=PAGES_HINT, source=source)


def _symint(mode: Any, expr: Any) -> torch.SymInt:
    """A symbolic int of an expression whose symbols the shape environment knows."""
    return mode.shape_env.create_symintnode(expr, hint=None)


def _canonical(mode: Any, value: Any) -> Any:
    """A symbolic int under the name that the tracer settled on for it, which is the one that code of the graph uses.

    What is 0 in the captured call is not where code is made behind Dynamo's guards: asked whether a tensor is empty, such an int would be
    0 from then on, and nobody would guard that.
    """
    if not isinstance(value, torch.SymInt) or value.node.expr.is_number:
        return value
    if mode.shape_env.frozen and empty_when_captured(value):
        return mode.shape_env.create_symintnode(value.node.expr, hint=NOT_EMPTY)
    return value if value.node.expr == value.node._expr else _symint(mode, value.node.expr)


def mark_inputs(captured: Captured, rewritten: Rewritten, steady: Collection[int]) -> None:
    """Give the inputs what AOTAutograd and CUDA graphs look for: sources, and which addresses stay."""
    module, origin = rewritten.module, captured.origin
    for name in ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn"):
        if name in origin.meta:
            module.meta[name] = origin.meta[name]
    constants = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    module._param_name_to_source = {name: ConstantSource(name) for name in constants}  # type: ignore[assignment]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    for node, index in zip(placeholders, rewritten.kept, strict=False):
        old = captured.inputs[index].placeholder
        node._dynamo_source = getattr(old, "_dynamo_source", None)  # type: ignore[attr-defined]
        if "tensor_dict" in old.meta:
            node.meta["tensor_dict"] = old.meta["tensor_dict"]
        if index in steady:
            node.meta["tensor_dict"] = {STATIC: "unguarded"} | node.meta.get("tensor_dict", {})
    own = placeholders[len(rewritten.kept) :]
    for node in own:
        node._dynamo_source = None  # type: ignore[attr-defined]
    # Cursors and sizes are made anew for every call.
    for node in own[: len(own) - len(rewritten.cursors) - len(rewritten.sizes)]:
        node.meta["tensor_dict"] = {STATIC: "unguarded"}


def forget_guards(captured: Captured, symbols: Collection[Any]) -> None:
    """The numbers of pages are ours: no guard on them may reach Dynamo, which does not know the symbols."""
    env = captured.fake_mode.shape_env
    if env is None or not symbols:
        return
    ours = [guard for guard in env.guards if guard.expr.free_symbols & set(symbols)]
    for guard in ours:
        log.debug("a guard on the number of pages is dropped: %s", guard.expr)
        env.guards.remove(guard)
