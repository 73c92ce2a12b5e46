"""One attention of many rows as the prefill template takes it; the many-row counterpart of ``decode.site``."""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.lowering.decode.site import masks_of
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import Sizes
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.tiles import FEWEST_ROWS


def many_rows(given: AttendOperands[Any], sizes: Sizes) -> int | None:
    """Return the number of query rows per kv head, queries times heads in a group; None if they are too few for the prefill template."""
    _, heads, queries, _ = sizes.shape(given.q)
    rows = sizes.hint(queries) * sizes.hint(heads) // sizes.hint(sizes.shape(given.keys[0])[2])
    return None if rows < FEWEST_ROWS or sizes.equals(queries, 1) else rows


def config_of(given: AttendOperands[Any], sizes: Sizes, paged: bool = True, packed: bool | None = None) -> PrefillConfig:
    """Return the configuration of the prefill template for an attention, before its tile and splits are chosen.

    ``paged``: False if one page holds all tokens; ``packed``: None unpacks by PTX except on HIP.
    """
    shape, static, dtype = sizes.shape, sizes.static, sizes.dtype
    (_, heads, _, dim), (_, _, kv, page_rows, _) = shape(given.q), shape(given.keys[0])
    kv = static(kv)
    return PrefillConfig(
        given.key_scheme, given.value_scheme, static(dim), static(given.value_dim), kv, static(heads) // kv, dtype(given.q),
        dtype(given.keys[0]), dtype(given.values[0]), float(given.scale), float(given.softcap), masks_of(given, sizes),
        static(page_rows) if paged else 1, paged, exact_newest=bool(given.exact_newest), base_per_batch=sizes.varies(given.base),
        packed=torch.version.hip is None if packed is None else packed,
    )


def nodes_of(config: PrefillConfig, given: AttendOperands[Any]) -> dict[str, Any]:
    """Return every operand but the queries that the template may read, by the template's names; ``config`` must fit."""
    nodes = {
        "K_WORDS": given.keys[0], "V_WORDS": given.values[0], "HI": given.hi, "LO": given.lo, "KEEP": given.keep,
        "SINKS": given.sinks, "BASE": given.base,
    }
    for letter, slot, planes in zip("KV", config.slots, (given.keys, given.values), strict=True):
        if slot.scaled:
            nodes[f"{letter}_SCALES"] = planes[1]
        if slot.zeros:
            nodes[f"{letter}_ZEROS"] = planes[2]
    if given.exact_newest:
        nodes["RECENT_K"], nodes["RECENT_V"] = given.exact_newest
    return {name: node for name, node in nodes.items() if node is not None}


def loadable(config: PrefillConfig, nodes: dict[str, Any], sizes: Sizes) -> bool:
    """Return whether the strides of word planes allow loads of two bytes, and rows of scales and zero points are contiguous."""
    for letter, slot in zip("KV", config.slots, strict=True):
        if slot.scaled and not sizes.multiple(nodes[f"{letter}_WORDS"], 2):
            return False
        if not all(sizes.multiple(nodes[name], 1) for name in (f"{letter}_SCALES", f"{letter}_ZEROS") if name in nodes):
            return False
    return True
