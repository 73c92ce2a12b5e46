"""``varlen_attn`` over a cache, rewritten as a gather, a mask and scaled_dot_product_attention, with a dim of batch rows.

The queries of all rows lie one after another; row r has those from ``cu_seq_q[r]`` to ``cu_seq_q[r + 1]``. They are padded to ``max_q`` a
row. Each row's keys and values are gathered by its block table, or from ``cu_seq_k[r]`` on: the matcher recognises both as reads of a pool,
and each query's last token as a limit. Only calls with ``seqused_k``, the number of cached tokens of each row, are rewritten, and only if
nothing but the output is read.

::

    out = varlen_attn(q [T, H, D], k_pool, v_pool, starts, None, max_q, max_k, window_size=(-1, 0), seqused_k=lengths, block_table=table)

is

    keys, values = k_pool[table].flatten(1, 2).transpose(1, 2), v_pool[table]...
    seen = arange(tokens) <= lengths - counts + arange(max_q)
    out = scaled_dot_product_attention(q[starts + arange(max_q)], keys, values, seen)[row, place]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

NAME = "torch_attn::_varlen_attn"


def over_a_cache(node: fx.Node) -> bool:
    """Return whether a node of Dynamo's graph is a ``varlen_attn`` that is rewritten: it has ``seqused_k``, and only its output is read."""
    target = getattr(node.target, "_qualified_op_name", None) or getattr(getattr(node.target, "_schema", None), "name", "")
    if node.op != "call_function" or target != NAME:
        return False
    read = {user.args[1] for user in node.users if user.users}
    return read <= {0} and given(*node.args, **node.kwargs)["seqused_k"] is not None


def given(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, is_causal: Any = False, scale: Any = None,
    window_size: Any = None, enable_gqa: Any = False, seqused_k: Any = None, block_table: Any = None, num_splits: Any = None,
) -> dict[str, Any]:
    """Return the operands of a call by name."""
    del enable_gqa, num_splits
    left, right = window_size or (-1, -1)
    return {
        "q": query, "k": key, "v": value, "starts": cu_seq_q, "starts_k": cu_seq_k, "max_q": max_q, "max_k": max_k, "scale": scale,
        "left": left, "right": 0 if is_causal else right, "seqused_k": seqused_k, "block_table": block_table,
    }


def explicit(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three results of a ``varlen_attn`` call, computed by plain operations; only the first one is valid."""
    call = given(*args, **kwargs)
    q, starts, lengths, most = call["q"], call["starts"], call["seqused_k"], call["max_q"]
    first, counts = starts[:-1], starts[1:] - starts[:-1]
    step = torch.arange(most, device=q.device)
    padded = q[(first[:, None] + step).clamp(0, q.shape[0] - 1)].transpose(1, 2)
    keys, values = _read(call)
    place = (lengths - counts)[:, None] + step
    last = (lengths - 1)[:, None]
    if call["right"] == 0:
        last = place
    elif call["right"] > 0:
        last = torch.minimum(place + call["right"], last)
    t = torch.arange(keys.shape[2], device=q.device)
    seen = t <= last[:, None, :, None]
    if call["left"] >= 0:
        seen = seen & (t >= (place - call["left"])[:, None, :, None])
    out = F.scaled_dot_product_attention(padded, keys, values, seen, scale=call["scale"], enable_gqa=q.shape[1] != keys.shape[1])
    token = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=first.shape[0] - 1)
    found = out.transpose(1, 2)[row, (token - first[row]).clamp(0, most - 1)]
    return found, found, found


def _read(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values that each row reads, [N, K, T, D] each; tokens behind a row's last one are arbitrary."""
    if call["block_table"] is not None:
        keys, values = (pool[call["block_table"]].flatten(1, 2).transpose(1, 2) for pool in (call["k"], call["v"]))
        return keys, values
    at = call["starts_k"][:-1, None] + torch.arange(call["max_k"], device=call["k"].device)
    at = at.clamp(0, call["k"].shape[0] - 1)
    return call["k"][at].transpose(1, 2), call["v"][at].transpose(1, 2)
