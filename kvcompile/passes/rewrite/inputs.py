"""Inputs: fake values to compile a rewritten graph with, and the metadata that AOTAutograd and CUDA graphs read."""

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
"""Hint for an int that is 0 in the captured call."""
PAGES_HINT = 64
"""Number of pages of a store that the compiler assumes where it must choose."""


def rewritten_inputs(captured: Captured, rewritten: Rewritten) -> tuple[tuple[Any, ...], dict[Any, str]]:
    """Return (fake values of the rewritten graph's inputs, a name for each new symbol); stores of equal growth share a symbol."""
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
                    # Each of these planes has its own length.
                    name = f"plane{item.first_plane + place}"
                    shape = spec.shape_of(_length(mode, f"{rewritten.variant.value}_{name}", symbols, name), batch, item.plan.spec.heads)
                planes.append(torch.empty(shape, dtype=spec.dtype, device=root.device))
        planes += [torch.empty(1, dtype=torch.int64, device=planes[0].device) for _ in rewritten.cursors]
    sizes = [_symint(mode, symbol) for symbol in rewritten.sizes]
    return (*[_canonical(mode, captured.fakes[index]) for index in rewritten.kept], *planes, *sizes), symbols


def _length(mode: Any, name: str, symbols: dict[Any, str], label: str) -> Any:
    """Return the length of planes along their first axis, the number of pages: a new symbol with source ``name``, recorded under ``label``.

    The name comes from the variant and not from a counter: each graph has its own shape environment, and a name that depended on earlier
    compilations would miss Inductor's disk cache.
    """
    if mode.shape_env is None:
        return PAGES_HINT
    source = ConstantSource(f"kvcompile_pages_{name}")
    symbol = mode.shape_env.create_symbol(PAGES_HINT, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    symbols[symbol] = f"N{label}"
    return mode.shape_env.create_symintnode(symbol, hint=PAGES_HINT, source=source)


def _symint(mode: Any, expr: Any) -> torch.SymInt:
    """Return a SymInt for an expression of known symbols."""
    made: torch.SymInt = mode.shape_env.create_symintnode(expr, hint=None)
    return made


def _canonical(mode: Any, value: Any) -> Any:
    """Return an input with its SymInt renamed to the symbol that the tracer finally uses; other values unchanged.

    If it is 0 in the captured call and Dynamo's guards are fixed, its hint becomes ``NOT_EMPTY``: a check for emptiness would otherwise
    specialise it to 0 without a guard.
    """
    if not isinstance(value, torch.SymInt) or value.node.expr.is_number:
        return value
    if mode.shape_env.frozen and empty_when_captured(value):
        return mode.shape_env.create_symintnode(value.node.expr, hint=NOT_EMPTY)
    return value if value.node.expr == value.node._expr else _symint(mode, value.node.expr)


def mark_inputs(captured: Captured, rewritten: Rewritten, steady: Collection[int]) -> None:
    """Set the metadata that AOTAutograd and CUDA graphs read: sources, and static addresses of planes and of arguments ``steady``."""
    module, origin = rewritten.module, captured.origin
    for name in ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn"):
        if name in origin.meta:
            module.meta[name] = origin.meta[name]
    constants = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    module._param_name_to_source = {name: ConstantSource(name) for name in constants}  # type: ignore[assignment]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    for node, index in zip(placeholders, rewritten.kept, strict=False):
        old = captured.inputs[index].placeholder
        node._dynamo_source = getattr(old, "_dynamo_source", None)
        if "tensor_dict" in old.meta:
            node.meta["tensor_dict"] = old.meta["tensor_dict"]
        if index in steady:
            node.meta["tensor_dict"] = {STATIC: "unguarded"} | node.meta.get("tensor_dict", {})
    own = placeholders[len(rewritten.kept) :]
    for node in own:
        node._dynamo_source = None
    # Cursors and sizes are new for every call.
    for node in own[: len(own) - len(rewritten.cursors) - len(rewritten.sizes)]:
        node.meta["tensor_dict"] = {STATIC: "unguarded"}


def forget_guards(captured: Captured, symbols: Collection[Any]) -> None:
    """Remove guards on our own page symbols from the shape environment: Dynamo does not know these symbols."""
    env = captured.fake_mode.shape_env
    if env is None or not symbols:
        return
    ours = [guard for guard in env.guards if guard.expr.free_symbols & set(symbols)]
    for guard in ours:
        log.debug("a guard on the number of pages is dropped: %s", guard.expr)
        env.guards.remove(guard)
