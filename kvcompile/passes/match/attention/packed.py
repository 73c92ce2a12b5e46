"""Attention over packed sequences (batch rows one after another in one dim): recognised only to be refused over a cache.

    varlen_attn(q [tokens, H, D], k [cached, K, D], v, cu_seq_q, cu_seq_k, max_q, max_k)

Where a row begins and ends is known on the device only, so the cached tokens have no rows and no positions that a store could count. With
``seqused_k`` ``varlen_attn`` has been spelled out before (``capture.varlen``), unless its log-sums are read.
"""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.shapes import op_name
from kvcompile.passes.match.sites import Attention, Miss

NAMES = frozenset({
    "_varlen_attn", "_varlen_attn_out", "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace",
    "_efficient_attention_forward",
})


def recognise(node: fx.Node) -> Attention | None:
    """Return None for any node but an attention over packed rows, for which it raises Miss."""
    name = op_name(node)
    if name not in NAMES:
        return None
    spelled = "varlen_attn (torch.nn.attention.varlen)" if "varlen" in name else name
    raise Miss(
        f"the cache is read by {spelled}, which takes rows packed one after another: where each row begins is known on the device "
        "only", node,
        advice="call varlen_attn with seqused_k (torch 2.12), and read no log-sums of it; or keep a dim of batch rows and call "
        "scaled_dot_product_attention",
    )
