"""The attention function of continuous batching: transformers calls it for each layer, and it attends over that layer's pool of codes.

The engine packs the new tokens of all requests into one row, and gives each request's range by cumulative lengths. Its write index is the
argument ``slots`` of our operations. It gives the blocks of each request as a block table for a step of one token each (its decode path),
as a list (``allocators``) for any other step that reads cached tokens, and not at all for a step of whole prompts, whose slots show them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kvcompile.errors import EngineUnfit
from kvcompile.serving.continuous_batching.versions import ENGINE, CallNames


@dataclasses.dataclass(frozen=True)
class StepTables:
    """The operands of ``kvcompile.serving.operations`` that all layers of one kind (full or sliding attention) share in one step."""

    slots: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    max_queries: int
    max_length: int


def attend_codes(
    arguments: CallNames, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None,
    cache: Any, passed: Mapping[str, Any],
) -> torch.Tensor:
    """Write a layer's new keys and values [1, K, T, D] into its pool; return attention with queries [1, H, T, D]: [1, T, H, Dv]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    allocator = cache.layer_to_allocator[layer]
    pool = allocator.pools[layer]
    tables = step_tables(arguments, allocator, layer, passed)
    pool.append(key[0].transpose(0, 1), value[0].transpose(0, 1), tables.slots)
    out, _ = pool.attend(
        query[0].transpose(0, 1), tables.block_table, tables.lengths, tables.query_start, tables.max_queries, scale=scaling,
        softcap=passed.get("softcap") or 0.0, window=window_of(allocator, layer, passed), sinks=passed.get("s_aux"),
        max_length=tables.max_length,
    )
    return out[None]  # type: ignore[no-any-return]


def step_tables(arguments: CallNames, allocator: Any, layer: int, passed: Mapping[str, Any]) -> StepTables:
    """Return this step's tables; the first layer of each kind makes them, and the others use the same.

    While a compiler traces, each layer makes its own, and the compiler merges the equal ones. Records in the allocator that ``layer`` was
    called.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        allocator.called.add(layer)
    if layer == allocator.layer_indices[0] or compiling:
        made = _step_tables(arguments, allocator, passed)
        if not compiling:
            allocator.step = made
        return made
    return allocator.step  # type: ignore[no-any-return]


def _step_tables(arguments: CallNames, allocator: Any, passed: Mapping[str, Any]) -> StepTables:
    page, index, kind = allocator.tokens_per_page, allocator.index, allocator.layer_type
    start, ends, longest = passed["cu_seq_lens_q"], passed["cu_seq_lens_k"], passed[arguments.keys]
    if arguments.by_type or isinstance(ends, dict):
        ends, longest = ends[kind], longest[kind]
    lengths = ends[1:] - ends[:-1]
    if passed.get("block_table") is not None:
        table = passed["block_table"][index]
        last = lengths - 1
        block = table.gather(1, (last.clamp(min=0) // page).to(torch.int64)[:, None])[:, 0]
        return StepTables(torch.where(last >= 0, block * page + last % page, -1), table, lengths, start, 1, 0)
    slots, read = passed["write_index"][index], passed["read_index"][index]
    place = torch.arange(-(-longest // page), device=slots.device)
    if read.shape[0]:
        blocks = (lengths + page - 1) // page
        table = read[(((blocks.cumsum(0) - blocks)[:, None] + place).clamp(max=read.shape[0] - 1))]
    else:
        table = slots[(start[:-1, None] + place * page).clamp(max=slots.shape[0] - 1)] // page
    return StepTables(slots, table, lengths, start, passed[arguments.queries], longest)


def window_of(allocator: Any, layer: int, passed: Mapping[str, Any]) -> int:
    """Return the number of tokens in a layer's window, 0 for none.

    Raises EngineUnfit if the model passes another window than its config has.
    """
    given = passed.get("sliding_window") or 0
    window: int = getattr(allocator, "window", 0)
    if given != window:
        raise EngineUnfit(
            engine=ENGINE, expected=f"a window of {window or 'all'} tokens in layer {layer}, as the config says",
            found=given or "no window", todo="serve this model without kvcompile.serving.install",
        )
    return window


def require_plain(cache: Any, layer: object, passed: Mapping[str, Any]) -> None:
    """Raise EngineUnfit for a call outside of continuous batching, and for arguments that paged attention does not support."""
    refusals = (
        (cache is None, "a paged cache", "none", "leave continuous batching's context before calling the model in another way"),
        (
            passed.get("position_bias") is not None, "an attention without a bias of scores", f"position_bias in layer {layer}",
            "serve this model without kvcompile.serving.install",
        ),
        (passed.get("is_causal") is False, "causal attention", f"is_causal=False in layer {layer}", "serve decoder models alone"),
        (bool(passed.get("output_attentions")), "results alone", "output_attentions=True", "leave it out: weights are never made"),
    )
    for applies, expected, found, todo in refusals:
        if applies:
            raise EngineUnfit(engine=ENGINE, expected=expected, found=found, todo=todo)
