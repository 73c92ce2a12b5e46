"""The attend kernel that a site of a rewritten graph gets on a GPU, chosen without one.

The same choices as Inductor's lowering makes (``triton_attend``), read from the fake values of an ``attend``
node in place of Inductor's buffers, and with the multiprocessors of a named architecture in place of a device's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.lowering import ops
from kvcompile.lowering.attend_config import AttendConfig, Bias, Masks
from kvcompile.lowering.offline import attend_source
from kvcompile.lowering.tiles import choose_tiles, splits_for
from kvcompile.types import PAGE

MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
"""Of an A100, an H100 or H200, a B200: only the number of splits depends on it."""


@dataclass(frozen=True)
class SiteKernel:
    """One kernel and the sizes that it is rendered for: batch rows B and new tokens S."""

    config: AttendConfig
    batch: int
    queries: int

    def source(self) -> str:
        """The Triton module."""
        return attend_source(self.config, self.batch, self.queries)


def attends(module: fx.GraphModule) -> list[fx.Node]:
    """The attend nodes of a rewritten graph, in order."""
    return list(module.graph.find_nodes(op="call_function", target=ops.attend))


def site_kernel(node: fx.Node, arch: str, hint: Callable[[Any], int]) -> SiteKernel:
    """The kernel of one ``attend`` node whose operands carry fake values; ``hint`` makes sizes plain numbers."""
    given = inspect.signature(ops.attend_meta).bind(*node.args, **node.kwargs).arguments
    given = {name: fx.node.map_arg(value, lambda item: item.meta["val"]) for name, value in given.items()}
    q, keys, values = given["q"], given["keys"], given["values"]
    batch, heads, queries, head_dim = (hint(size) for size in q.shape)
    kv_heads = hint(keys[0].shape[2])
    pages = keys[0].shape[0]
    paged = not (isinstance(pages, int) and pages == 1)
    group = heads // kv_heads
    config = AttendConfig(
        given["key_scheme"], given["value_scheme"], head_dim, hint(given["value_dim"]), kv_heads, group, q.dtype, keys[0].dtype,
        values[0].dtype, float(given["scale"]), float(given["softcap"]), queries == 1,
        _masks(given["lo"], given["keep"], given["bias"], given["sinks"], given["hi"], hint), PAGE if paged else 1, paged,
        wide_keys=hint(keys[0].shape[-1]) % 2 == 0, wide_values=hint(values[0].shape[-1]) % 2 == 0,
        key_scale_pack=_scale_pack(keys, hint), value_scale_pack=_scale_pack(values, hint),
    )
    rows = queries * group
    tiled = choose_tiles(config, rows, PAGE if paged else None, tuned=False)[0]
    splits = splits_for(tiled, rows, batch * kv_heads, MULTIPROCESSORS[arch], hint(pages) * hint(keys[0].shape[3]))
    return SiteKernel(tiled.with_splits(splits, splits == 1 and len(config.plans[1].pieces) == 1), batch, queries)


def _scale_pack(planes: list[torch.Tensor], hint: Callable[[Any], int]) -> int:
    """How many scales of a row are loaded at once: all, where they are two or four float16."""
    scales = hint(planes[-1].shape[-1])
    return scales if planes[-1].dtype == torch.float16 and scales in {2, 4} else 1


def _masks(lo: Any, keep: Any, bias: Any, sinks: Any, hi: Any, hint: Callable[[Any], int]) -> Masks:
    def varies(value: torch.Tensor | None, axis: int) -> bool:
        return value is not None and hint(value.shape[axis]) != 1

    kind = Bias.NONE if bias is None else Bias.BOOLEAN if bias.dtype == torch.bool else Bias.ADDED
    return Masks(
        lo is not None, keep is not None, kind, sinks is not None, varies(hi, 0), varies(lo, 0), varies(keep, 0),
        varies(bias, 0), varies(bias, 1), varies(bias, 2),
    )
