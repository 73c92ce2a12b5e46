"""Advice: the refusals of operands that are not plain views of a cache, with code that the author could write instead."""

from __future__ import annotations

import numpy as np
from torch import fx

from kvcompile.passes.graph.operators import CONCATENATIONS, JOINS, Kind, named
from kvcompile.passes.graph.pullback import Trail, trace
from kvcompile.passes.graph.shapes import bind, op_name, sizes
from kvcompile.passes.match.cache.gathers import GATHERS
from kvcompile.passes.match.sites import Miss

MIXES = named(Kind.PRODUCT, Kind.PROJECTION)
NAMES = {"B": "batch rows", "K": "kv heads", "T": "tokens", "D": "channels"}
REPEATS = frozenset({"expand", "repeat", "repeat_interleave"})
WHOLE = "read the cache from its first token, all rows and channels, heads in order"


def made_from(behind: fx.Node, base: fx.Node | None) -> Miss:
    """Return the Miss for keys or values that are computed from the cache tensor ``behind`` rather than views of it.

    ``base``: the node at which the operand's views end.
    """
    name = op_name(base)
    if base is not None and (miss := learned(base)) is not None:
        return miss
    if name in GATHERS:
        return Miss(
            f"the attention reads what {name} gathers from the cache, and not whole tokens from slots of a tensor that is written in place",
            base or behind,
            advice="gather tokens, blocks of tokens or rows, all heads and channels of them, from the tensor that the call writes to",
        )
    if name in MIXES:
        what, advice = "projected", "cache the projected keys and values, which is what attention reads"
    elif name in JOINS:
        what, advice = "assembled", "write all that attention reads into one cache: nothing is concatenated to it afterwards"
    elif name in {"add", "sub", "mul", "div"}:
        what, advice = "rotated, scaled or normalised after they are read", "apply RoPE and norms before the write, and scale the queries"
    else:
        what, advice = "by another operation than a view", "cache what attention reads, and write it in place or with torch.cat"
    by = f", here by {name}" if name else ""
    return Miss(f"keys or values are made from the cache rather than read from it ({what}{by})", base or behind, advice=advice)


def learned(join: fx.Node) -> Miss | None:
    """Return the Miss of a concatenation of a cache with tokens that all rows share, such as memory keys; None for other nodes."""
    for part in bind(join)["tensors"] if op_name(join) in CONCATENATIONS else ():
        trail = trace(part, lambda node: node.op == "placeholder")
        if trail.base.op == "placeholder" and any(op_name(node) in REPEATS for node in trail.path):
            return Miss(
                "the cache is joined to tokens that are the same in all rows (learned memory keys or values, bias_k or bias_v, say)", join,
                advice="join parameters ahead of the cache (torch.cat([memory, cache], 2)), or make them the cache's first tokens",
            )
    return None


def no_plain_view(trail: Trail, columns: dict[str, tuple[np.ndarray, int]], operand: fx.Node, token_dim: int) -> Miss:
    """Return the Miss of an operand that holds the cache's elements, but not all of them in order."""
    return Miss(f"the operand is no plain view of the whole cache: {_missing(trail, columns, token_dim)}", operand, advice=WHOLE)


def _missing(trail: Trail, columns: dict[str, tuple[np.ndarray, int]], token_dim: int) -> str:
    """Return in words which elements of the cache an operand lacks, or that their order differs."""
    tokens = trail.there[:, token_dim] - columns["T"][0]
    if (tokens == tokens[0]).all() and tokens[0]:
        return f"it begins at token {tokens[0]}"
    if tokens.any():
        return "its tokens are not those of the cache, one after the other"
    for dim, size in enumerate(sizes(trail.base)):
        for role, (column, count) in columns.items():
            shift = trail.there[:, dim] - column
            if dim != token_dim and role in NAMES and 1 < count < size and (shift == shift[0]).all():
                return f"it reads {count} of {size} {NAMES[role]}"
    return "its heads or rows are in another order than the cache's, or only some of them"
