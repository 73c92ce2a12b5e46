"""Inductor's lowering of ``kvcompile::attend`` with many rows on CUDA: normalized queries, the prefill template, a merge.

With very many rows over codes, ``kvcompile::attend_chunks`` replaces the template: a call in the output module, since the
number of chunks is known only at run time.

Queries are scaled into float16 by Inductor's own operations, which fuse with their producers; the tensor cores
then read them from shared memory, while a conversion in the kernel would hold them in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch

from kvcompile.lowering.codegen.padding import skip_padding
from kvcompile.lowering.codegen.template_sizes import GLOBALS
from kvcompile.lowering.decode.config import Bias, Masks
from kvcompile.lowering.decode.lower import attend_grid, merge
from kvcompile.lowering.host.buffers import equals, examples, hint, multiple, realize, static, varies
from kvcompile.lowering.host.inductor_api import TritonTemplate, autotuned, fallback_handler, ir, lowerings
from kvcompile.lowering.host.inductor_entry import config as inductor_config
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.prefill import chunked, first_tokens
from kvcompile.lowering.prefill.config import SMALLEST, PrefillConfig, slots
from kvcompile.lowering.prefill.template import SOURCE
from kvcompile.lowering.prefill.tiles import FEWEST_ROWS, choose_cut, choose_tiles, splits_for

aten, prims = torch.ops.aten, torch.ops.prims


prefill_template = TritonTemplate(name="kvcompile_prefill", grid=attend_grid, source=SOURCE)
# The template calls ``slots`` while it is rendered.
prefill_template.template.globals |= GLOBALS | {"slots": slots, "skip_padding": skip_padding}


def many_rows(operands: AttendOperands[Any]) -> int | None:
    """Return the query rows of a kv head if they are enough for this template, otherwise None."""
    _, H, S, _ = operands.q.get_size()
    rows = hint(S) * hint(H) // hint(operands.keys[0].get_size()[2])
    return None if rows < FEWEST_ROWS or equals(S, 1) else rows


def lower_prefill(operands: AttendOperands[Any]) -> Any | None:
    """Return the result of ``attend`` of many rows as a TensorBox, None if the template does not support its strides or schemes."""
    if not operands.exact_first or many_rows(operands) is None:
        return _lower(operands)
    return _lower(*lower_first(operands))


def lower_first(operands: AttendOperands[Any]) -> tuple[AttendOperands[Any], tuple[Any, Any, Any]]:
    """Return operands whose mask hides the first tokens' codes, and sums, maxima and totals over these tokens, as ``merge`` takes them."""
    assert operands.exact_first is not None
    q, keys, device = operands.q, operands.keys, operands.q.get_device()
    (batch, heads, queries, dim), kv, count = q.get_size(), static(keys[0].get_size()[2]), static(operands.exact_first[0].get_size()[3])
    capacity = keys[0].get_size()[0] * keys[0].get_size()[3]
    seen = capacity if operands.keep is None else operands.keep.get_size()[1]
    place = first_tokens.places(_do, operands, count, batch, device)
    sizes = batch, static(heads), kv, queries, static(dim), static(operands.value_dim)
    sums = first_tokens.partial_sums(_do, realize, operands, place, sizes, count, capacity, seen)
    keep = first_tokens.kept(_do, operands.keep, place, count, seen, device)
    return dataclasses.replace(operands, keep=keep, exact_first=None, exact_first_at=None), sums


def _do(op: Any, *args: Any, **options: Any) -> Any:
    """Call Inductor's lowering of an operator."""
    return lowerings[op](*args, **options)


def _lower(operands: AttendOperands[Any], more: tuple[Any, Any, Any] | None = None) -> Any | None:
    """Return the result of an ``attend`` without first tokens, or merged with partial sums ``more`` over them; None if not supported."""
    q, keys, values, hi, lo, keep, sinks, exact_newest, base = (
        operands.q, operands.keys, operands.values, operands.hi, operands.lo, operands.keep, operands.sinks, operands.exact_newest,
        operands.base,
    )
    rows = many_rows(operands)
    if operands.rope or operands.bias is not None or rows is None:
        return None
    B, H, S, D = q.get_size()
    H, K, D, Dv = (static(x) for x in (H, keys[0].get_size()[2], D, operands.value_dim))
    page_rows = static(keys[0].get_size()[3]) if not equals(keys[0].get_size()[0], 1) else 1
    paged = page_rows > 1
    config = PrefillConfig(
        operands.key_scheme, operands.value_scheme, D, Dv, K, H // K, q.get_dtype(), keys[0].get_dtype(), values[0].get_dtype(),
        float(operands.scale), float(operands.softcap),
        Masks(lo is not None, keep is not None, Bias.NONE, sinks is not None, varies(hi), varies(lo), varies(keep)), page_rows, paged,
        exact_newest=bool(exact_newest), base_per_batch=varies(base), packed=torch.version.hip is None,
    )
    if not (config.fits or config.chunks) or (paged and page_rows & (page_rows - 1)):
        return None
    nodes = {"SINKS": realize(sinks)} if sinks is not None else {}
    if config.fits:
        nodes = _operands(config, operands)
        if not _loadable(config, nodes):
            return None
    device, dtype = q.get_device(), None if operands.log_sums else q.get_dtype()
    properties: Any = torch.cuda.get_device_properties(device)
    capacity = keys[0].get_size()[0] * page_rows
    cut = choose_cut(
        config, rows, hint(B), properties.multi_processor_count, properties.shared_memory_per_block_optin,
        int(capacity) if isinstance(capacity, (int, sympy.Integer)) else None,
    )
    if cut is not None:
        partial = fallback_handler(chunked.operation)(
            q, list(keys), list(values), hi, lo, keep, operands.key_scheme, operands.value_scheme, float(operands.scale),
            float(operands.softcap), Dv, exact_newest, base, list(cut),
        )
        return merge(partial, nodes.get("SINKS"), Dv, dtype, more)
    if not config.fits:
        return None
    nodes |= _queries(config, q)
    configs = choose_tiles(config, rows, properties.shared_memory_per_block_optin, bool(inductor_config.max_autotune))
    if not configs:
        return None
    tokens = hint(keys[0].get_size()[0]) * hint(keys[0].get_size()[3])
    # Log-sums and ``more`` need the merge, so the template must not write the result itself.
    least = 1 if more is None and dtype is not None else 2
    splits = max(splits_for(configs[0], rows, hint(B) * K, properties.multi_processor_count, tokens), least)
    size = [B, H, S, Dv] if splits == 1 else [splits, B, H, S, Dv + 2]
    layout = ir.FixedLayout(device, q.get_dtype() if splits == 1 else torch.float32, size, list(ir.FlexibleLayout.contiguous_strides(size)))
    choices: list[Any] = []
    for tiled in configs:
        made = tiled.with_splits(splits)
        inputs = [nodes[name] for name in made.operands]
        prefill_template.maybe_append_choice(
            choices, input_nodes=inputs, layout=layout, call_sizes=[B, sympy.Integer(K), S * (H // K)],
            num_warps=made.tile.num_warps, num_stages=made.tile.num_stages, **made.options(),
        )
    # Time with every position in use, so that choices differ by their work.
    in_use = {"HI": tokens - 1, "LO": 0, "KEEP": 1, "BASE": tokens}
    partial = autotuned("kvcompile_prefill", choices, inputs, layout, examples(made.operands, in_use))
    return partial if splits == 1 else merge(partial, nodes.get("SINKS"), Dv, dtype, more)


def _operands(config: PrefillConfig, operands: AttendOperands[Any]) -> dict[str, Any]:
    """Return every operand but the queries that the template may read, as buffers with fixed strides, by name."""
    key, value = config.slots
    nodes = {
        "K_WORDS": operands.keys[0], "V_WORDS": operands.values[0], "HI": operands.hi, "LO": operands.lo, "KEEP": operands.keep,
        "SINKS": operands.sinks, "BASE": operands.base,
    }
    for letter, slot, planes in (("K", key, operands.keys), ("V", value, operands.values)):
        if slot.scaled:
            nodes[f"{letter}_SCALES"] = planes[1]
        if slot.zeros:
            nodes[f"{letter}_ZEROS"] = planes[2]
    if operands.exact_newest:
        nodes["RECENT_K"], nodes["RECENT_V"] = operands.exact_newest
    return {name: realize(node) for name, node in nodes.items() if node is not None}


def _queries(config: PrefillConfig, q: Any) -> dict[str, Any]:
    """Return the queries in the forms that the template may read, as buffers, by name."""
    nodes = {"Q": realize(q)}
    nodes["Q_RAW"] = nodes["Q"]
    if config.slots[0].scaled:
        nodes["Q"], nodes["Q_SCALES"] = (realize(node) for node in _normalized(q))
    return nodes


def _normalized(q: Any) -> tuple[Any, Any]:
    """Return ``config.normalized`` in Inductor's operations."""
    wide = _do(prims.convert_element_type, q, torch.float32)
    top = _do(aten.maximum, _do(aten.amax, _do(aten.abs, wide), [-1], True), SMALLEST)
    exponent = _do(aten.add, _do(aten.floor, _do(aten.log2, top)), 1.0)
    small = _do(prims.convert_element_type, _do(aten.mul, wide, _do(aten.exp2, _do(aten.neg, exponent))), torch.float16)
    return small, _do(aten.squeeze, _do(aten.exp2, exponent), -1)


def _loadable(config: PrefillConfig, nodes: dict[str, Any]) -> bool:
    """Return whether pairs of word bytes can be loaded as one, and rows of scales are contiguous."""
    for letter, slot in zip("KV", config.slots, strict=True):
        if slot.scaled and not multiple(nodes[f"{letter}_WORDS"], 2):
            return False
        for name in (f"{letter}_SCALES", f"{letter}_ZEROS"):
            if name in nodes and not equals(nodes[name].get_stride()[-1], 1):
                return False
    return True


