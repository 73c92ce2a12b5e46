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
from kvcompile.lowering.decode.lower import attend_grid, layout_of, machine_of, merge, tuned
from kvcompile.lowering.host import buffers
from kvcompile.lowering.host.buffers import equals, hint, realize, static
from kvcompile.lowering.host.inductor_api import TritonTemplate, fallback_handler, lowerings
from kvcompile.lowering.host.inductor_entry import config as inductor_config
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.prefill import chunked, first_tokens, site
from kvcompile.lowering.prefill.config import SMALLEST, PrefillConfig, slots
from kvcompile.lowering.prefill.template import SOURCE
from kvcompile.lowering.prefill.tiles import choose_cut, choose_tiles, splits_for

aten, prims = torch.ops.aten, torch.ops.prims


prefill_template = TritonTemplate(name="kvcompile_prefill", grid=attend_grid, source=SOURCE)
# The template calls ``slots`` while it is rendered.
prefill_template.template.globals |= GLOBALS | {"slots": slots, "skip_padding": skip_padding}


def lower_prefill(operands: AttendOperands[Any]) -> Any | None:
    """Return the result of ``attend`` of many rows as a TensorBox, None if the template does not support its strides or schemes."""
    if not operands.exact_first or site.many_rows(operands, buffers) is None:
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
    """Return the result of Inductor's lowering of ``op``."""
    return lowerings[op](*args, **options)


def _lower(operands: AttendOperands[Any], more: tuple[Any, Any, Any] | None = None) -> Any | None:
    """Return the result of an ``attend`` without first tokens, or merged with partial sums ``more`` over them; None if not supported."""
    q, keys, rows = operands.q, operands.keys, site.many_rows(operands, buffers)
    if operands.rope or operands.bias is not None or rows is None:
        return None
    pages, page_rows = keys[0].get_size()[0], keys[0].get_size()[3]
    config = site.config_of(operands, buffers, paged=not equals(pages, 1) and static(page_rows) > 1)
    if not (config.fits or config.chunks) or config.page_rows & (config.page_rows - 1):
        return None
    nodes = {} if operands.sinks is None else {"SINKS": realize(operands.sinks)}
    if config.fits:
        nodes = {name: realize(node) for name, node in site.nodes_of(config, operands).items()}
        if not site.loadable(config, nodes, buffers):
            return None
    (device, machine), dtype = machine_of(q), None if operands.log_sums else q.get_dtype()
    batch, capacity = hint(q.get_size()[0]), pages * config.page_rows
    cut = choose_cut(
        config, rows, batch, machine.multiprocessors, machine.shared_memory,
        int(capacity) if isinstance(capacity, (int, sympy.Integer)) else None,
    )
    if cut is not None:
        partial = fallback_handler(chunked.operation)(
            q, list(keys), list(operands.values), operands.hi, operands.lo, operands.keep, operands.key_scheme, operands.value_scheme,
            float(operands.scale), float(operands.softcap), config.value_dim, operands.exact_newest, operands.base, list(cut),
        )
        return merge(partial, nodes.get("SINKS"), config.value_dim, dtype, more)
    if not config.fits:
        return None
    nodes |= _queries(config, q)
    configs = choose_tiles(config, rows, machine.shared_memory, bool(inductor_config.max_autotune))
    if not configs:
        return None
    tokens = hint(pages) * hint(page_rows)
    # Log-sums and ``more`` need the merge, so the template must not write the result itself.
    least = 1 if more is None and dtype is not None else 2
    splits = max(splits_for(configs[0], rows, batch * config.kv_heads, machine.multiprocessors, tokens), least)
    # Time with every position in use, so that choices differ by their work.
    in_use = {"HI": tokens - 1, "LO": 0, "KEEP": 1, "BASE": tokens}
    layout = layout_of(device, operands, splits == 1, splits)
    partial = tuned(prefill_template, [tiled.with_splits(splits) for tiled in configs], nodes, layout, in_use)
    return partial if splits == 1 else merge(partial, nodes.get("SINKS"), config.value_dim, dtype, more)


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
