"""Attention spelled as one ``scaled_dot_product_attention`` call.

::

    k, v  = index_copy_(k_cache, 2, pos, new_k), index_copy_(v_cache, 2, pos, new_v)
    seen  = le(arange(T), unsqueeze(pos, 1))
    out   = scaled_dot_product_attention(q, k, v, seen)
    after:
    append(new_k, k_planes, unsqueeze(pos, 0), "int8"); append(new_v, v_planes, unsqueeze(pos, 0), "int8")
    out   = attend(q, k_planes, v_planes, hi=unsqueeze(pos, 0), lo=None, keep=None, bias=None, "int8", "int8", scale)

The fused operators that implement it take the same operands; models call them for the log-sums that they return as well.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from kvcompile.passes.graph.shapes import bind, hint, op_name, operand, same, sizes, value_of
from kvcompile.passes.match.sites import Attention, Factor, MaskKind, MaskTerm, Miss

NAMES = {"scaled_dot_product_attention"}
FUSED = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
})
"""Operators over [B, H, S, D] that return the output, the log-sums [B, H, S], and tensors for their backward."""


def mask_roles(node: fx.Node, roles: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    """Return the roles of a mask's dims, aligned right with the scores' ``roles``; '' for a dim that broadcasts."""
    shape = sizes(node)
    aligned = roles[len(roles) - len(shape) :]
    return tuple(role if size != 1 or (role == "T" and tokens == 1) else "" for role, size in zip(aligned, shape, strict=True))


def recognise(node: fx.Node) -> Attention | None:
    """Return the attention of an SDPA node or fused operator, None for other nodes; raises Miss where it is not supported."""
    name = op_name(node)
    if name not in NAMES | FUSED:
        return None
    output, log, nodes = _results(node) if name in FUSED else (node, None, (node,))
    if output is None:
        return None
    arguments = bind(node)
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    if arguments["dropout_p"]:
        raise Miss("attention dropout is on", node, advice="call model.eval()")
    rank = len(sizes(q))
    q_roles: tuple[str, ...]
    k_roles: tuple[str, ...]
    if rank == 4:
        head = "K" if sizes(k)[1] != sizes(q)[1] else "H"
        q_roles, k_roles = ("B", "H", "S", "D"), ("B", head, "T", "D")
    elif rank == 3:
        q_roles, k_roles = ("BH", "S", "D"), ("BH", "T", "D")
    elif rank == 5:
        q_roles, k_roles = ("B", "K", "G", "S", "D"), ("B", "K", "G", "T", "D")
    elif rank == 2:
        q_roles, k_roles = ("S", "D"), ("T", "D")
    else:
        raise Miss(f"scaled_dot_product_attention over tensors of rank {rank}", node, advice="flatten batch and heads to [B, H, S, D]")
    scores = (*q_roles[:-1], "T")
    masks: tuple[MaskTerm, ...] = ()
    mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if mask is not None:
        kind = MaskKind.BOOL if value_of(mask).dtype.is_floating_point is False else MaskKind.ADD
        masks = (MaskTerm(mask, kind, mask_roles(mask, scores, sizes(k)[-2]), dtype=value_of(q).dtype),)
    scale = arguments["scale"]
    if scale is None:
        scale = 1 / math.sqrt(hint(value_of(q).shape[-1]))
    factors = (Factor(scale),) if isinstance(scale, fx.Node) else ()
    causal = bool(arguments["is_causal"])
    if name in FUSED and causal and not same(value_of(q).shape[2], value_of(k).shape[2]):
        raise Miss(
            f"{name} with is_causal over more tokens than it has queries: which of them the first query sees depends on the kernel", node,
            advice="give a mask, or call scaled_dot_product_attention",
        )
    found = Attention(
        "sdpa", output, nodes, q, q_roles, k, k_roles, v, k_roles, q_roles, 1.0 if factors else float(scale),
        masks=masks, causal=causal, factors=factors, log_sums=log, log_sum_roles=("B", "H", "S") if log is not None else (),
    )
    return replace(found, others=(_tiled(found),)) if rank == 5 else found


def _results(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None, tuple[fx.Node, ...]]:
    """Return (output, log-sums, all nodes) of a fused operator, with None for a result that is not read.

    Raises Miss if a result is read twice, other results are read, or the log-sums are padded.
    """
    found: dict[int, fx.Node] = {}
    for user in node.users:
        index = user.args[1] if op_name(user) == "getitem" else None
        if not isinstance(index, int) or index in found:
            raise Miss(f"the results of {op_name(node)} are read by {op_name(user) or user.op}", user, advice="take each result once")
        found[index] = user
    output, log = found.pop(0, None), found.pop(1, None)
    if found:
        raise Miss(
            f"{op_name(node)} is asked for more than its output and its log-sum", *found.values(), advice="leave them out when decoding",
        )
    # Some kernels pad the queries.
    if log is not None and sizes(log) != sizes(operand(node))[:3]:
        raise Miss(f"{op_name(node)} pads its log-sums", log, advice="call it with compute_log_sumexp for whole blocks of queries")
    return output, log, (node, *(item for item in (output, log) if item is not None))


def _tiled(attention: Attention) -> Attention:
    """Return the attention with its head dims read as groups, then kv heads."""
    swap = {"K": "G", "G": "K"}

    def turned(roles: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(swap.get(role, role) for role in roles)

    return replace(
        attention, q_roles=turned(attention.q_roles), k_roles=turned(attention.k_roles), v_roles=turned(attention.v_roles),
        out_roles=turned(attention.out_roles), masks=tuple(replace(term, roles=turned(term.roles)) for term in attention.masks),
    )
