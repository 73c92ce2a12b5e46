"""flex_attention as plain products and a softmax: its score and mask functions are run once over broadcast index grids.

Both functions are pointwise by contract, so one call over grids equals one call for each element; the reference implementation maps
them in the same way. The block mask's lists of blocks only mark blocks to skip, and are not read. Where the score function returns
scores unchanged, the result is scaled_dot_product_attention with a mask.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from kvcompile.passes.graph.dynamo import HigherOrderOperator, safe_softmax

NAME = "flex_attention"
CONSTANTS = {"new_ones", "ones", "device", "getattr"}
"""Calls that occur in the mask function of an empty block mask (one that hides nothing)."""


class Stays(Exception):
    """Raised if flex attention cannot be written as plain operations: its functions fail on whole grids."""


def is_flex(target: Any) -> bool:
    """Return whether ``target`` is Dynamo's operator for flex attention."""
    return isinstance(target, HigherOrderOperator) and target.__name__ == NAME


def operands(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that flex attention reads when written as plain operations: all operands but the block mask's lists."""
    q, k, v, score_mod, block_mask = node.args[:5]
    found = [q, k, v, score_mod, block_mask[-1], *node.args[5:], *node.kwargs.values()]  # type: ignore[index]
    read: set[fx.Node] = set()
    fx.node.map_arg(found, read.add)
    return read


def _leaves_scores(score_mod: fx.GraphModule) -> bool:
    nodes = list(score_mod.graph.nodes)
    returned = nodes[-1].args[0]
    return (returned[0] if isinstance(returned, (list, tuple)) else returned) is nodes[0]


def _hides_nothing(mask_mod: fx.GraphModule) -> bool:
    calls = [node for node in mask_mod.graph.nodes if node.op not in {"placeholder", "output"}]
    return all((node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in CONSTANTS for node in calls)


def _grid(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices of batch row, query head, query and key, each as a grid along its own dim of the scores [B, H, S, T]."""
    counts = (q.size(0), q.size(1), q.size(2), k.size(2))
    return tuple(
        torch.arange(count, device=q.device).view([-1 if dim == at else 1 for dim in range(4)]) for at, count in enumerate(counts)
    )


def explicit(
    used: Collection[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, block_mask: tuple[Any, ...], scale: float,
    kernel_options: dict[str, Any], score_buffers: tuple[Any, ...] = (), mask_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Return (output, log-sum in base 2, maximum in base 2) of flex attention by plain operations; q [B, H, S, D], k and v [B, K, T, D].

    Only results with an index in ``used`` are valid.
    """
    del kernel_options
    grid, mask_mod = _grid(q, k), block_mask[-1]
    seen = None if _hides_nothing(mask_mod) else _single(mask_mod(*grid, *mask_buffers))
    groups = q.size(1) // k.size(1)
    if _leaves_scores(score_mod) and not set(used) - {0}:
        if seen is not None and seen.dim() < 2:
            seen = seen.expand(q.size(2), k.size(2))
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=groups > 1)
        return out, out, out
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-2, -1) * scale).to(torch.promote_types(q.dtype, torch.float32))
    scores = _single(score_mod(scores, *grid, *score_buffers))
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    out = safe_softmax(scores, -1).to(q.dtype) @ v
    # The kernels report both in base 2.
    total = scores.logsumexp(-1) / math.log(2) if 1 in used else out
    peak = scores.amax(-1) / math.log(2) if 2 in used else out
    return out, total, peak


def _single(result: Any) -> torch.Tensor:
    found = result[0] if isinstance(result, (list, tuple)) else result
    assert isinstance(found, torch.Tensor)
    return found
