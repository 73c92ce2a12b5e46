"""Attention spelled as one ``scaled_dot_product_attention`` call."""

from __future__ import annotations

import math

from torch import fx

from kvcompile.passes.shapes import bind, hint, op_name, sizes, value_of
from kvcompile.passes.sites import Attention, MaskKind, MaskTerm, Miss

NAMES = {"scaled_dot_product_attention"}


def mask_roles(node: fx.Node, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Roles of a mask operand's dims, aligned right with the scores' roles; '' where a dim only broadcasts."""
    shape = sizes(node)
    aligned = roles[len(roles) - len(shape) :]
    return tuple(role if size != 1 or role == "T" else "" for role, size in zip(aligned, shape, strict=True))


def recognise(node: fx.Node) -> Attention | None:
    """The attention of an SDPA node, None where the node is no SDPA; raises Miss where it cannot be one of ours."""
    if op_name(node) not in NAMES:
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
    else:
        raise Miss(f"SDPA over tensors of rank {rank}", node)
    scores = (*q_roles[:-1], "T")
    masks: tuple[MaskTerm, ...] = ()
    if arguments["attn_mask"] is not None:
        mask = arguments["attn_mask"]
        kind = MaskKind.BOOL if value_of(mask).dtype.is_floating_point is False else MaskKind.ADD
        masks = (MaskTerm(mask, kind, mask_roles(mask, scores)),)
    scale = arguments["scale"]
    if scale is None:
        scale = 1 / math.sqrt(hint(value_of(q).shape[-1]))
    return Attention(
        "sdpa", node, (node,), q, q_roles, k, k_roles, v, k_roles, q_roles, float(scale),
        masks=masks, causal=bool(arguments["is_causal"]),
    )
