"""The counts of ``ops.kept_tokens`` as a buffer of Inductor's graph."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from kvcompile.lowering.host.buffers import realize
from kvcompile.lowering.host.inductor_api import V, ceildiv, ir, virtual_ops


def kept_tokens(keep: Any, run: int) -> Any:
    """Return the number of tokens that ``keep``, a mask bool [B, T], keeps in each run of ``run``: a buffer int32 [B, ceil(T / run)].

    All layers with the same mask share one buffer. A mask that the graph mutates is recounted at every use: its buffer name stands for two
    contents.
    """
    node = realize(keep)
    known: dict[tuple[str, str, int], Any] = V.graph.__dict__.setdefault("_kvcompile_kept_tokens", {})
    key = (node.get_name(), str(node.get_layout()), run)
    if key not in known or node.get_name() in V.graph.mutated_buffers:
        known[key] = _counted(node, run)
        known[key].realize()
    return known[key]


def _counted(node: Any, run: int) -> Any:
    rows, tokens = node.get_size()
    load = node.make_loader()
    whole = V.graph.sizevars.statically_known_multiple_of(tokens, run)

    def count(index: Any, reduced: Any) -> Any:
        token = index[1] * run + reduced[0]

        def kept() -> Any:
            return virtual_ops.to_dtype(load([index[0], token]), torch.int32)

        if whole:
            return kept()
        there = virtual_ops.lt(virtual_ops.index_expr(token, torch.int64), virtual_ops.index_expr(tokens, torch.int64))
        return virtual_ops.masked(there, kept, 0)

    return ir.Reduction.create(
        device=node.get_device(), dst_dtype=torch.int32, src_dtype=torch.int32, inner_fn=count,
        ranges=[rows, ceildiv(tokens, run)], reduction_ranges=[sympy.Integer(run)], reduction_type="sum",
    )
