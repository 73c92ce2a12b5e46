"""First tokens in full precision for the prefill template: separate partial sums, merged with those of the template's splits.

They are few (N), so even for many rows they take two small products in Inductor's own operations; the template gets a mask that hides
their codes. All functions take ``do``, which calls an operator: Inductor's lowering of it, or the operator itself in a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcompile.lowering.decode.template import LOG2E
from kvcompile.lowering.ops.operands import AttendOperands

aten, prims = torch.ops.aten, torch.ops.prims

Do = Callable[..., Any]


def places(do: Do, operands: AttendOperands[Any], count: int, batch: Any, device: torch.device) -> Any:
    """Return the positions of the first tokens, int64 [1 or B, N]."""
    row = do(aten.unsqueeze, _iota(do, count, device), 0)
    return row if operands.exact_first_at is None else do(aten.add, do(aten.reshape, operands.exact_first_at, [batch, 1]), row)


def kept(do: Do, keep: Any | None, place: Any, count: int, tokens: Any, device: torch.device) -> Any:
    """Return a mask, bool [1 or B, T'], that is False for the first tokens, and where ``keep`` is False if that is given."""
    first = do(aten.slice.Tensor, place, 1, 0, 1)
    row = do(aten.unsqueeze, _iota(do, tokens, device), 0)
    others = do(aten.logical_or, do(aten.lt, row, first), do(aten.ge, row, do(aten.add, first, count)))
    return others if keep is None else do(aten.logical_and, keep, others)


def partial_sums(
    do: Do, hold: Callable[[Any], Any], operands: AttendOperands[Any], place: Any, sizes: tuple[Any, int, int, Any, int, int], count: int,
    capacity: Any, keep_tokens: Any,
) -> tuple[Any, Any, Any]:
    """Return sums [B, H, S, Dv], maxima of base-2 scores and totals [B, H, S, 1] over the first tokens, in float32.

    ``sizes``: B, H, K, S, D, Dv. ``keep_tokens``: positions in ``keep``. ``hold``: realizes a value as a buffer. Products are sums of
    elementwise products: they are few, and a matrix product's lowering inspects the node being lowered, which is another one here.
    """
    batch, heads, kv, queries, dim, value_dim = sizes
    assert operands.exact_first is not None
    shape = [batch, kv, heads // kv, queries]
    visible = _visible(do, operands, place, count, batch, capacity, keep_tokens)

    def wide(x: Any) -> Any:
        return do(prims.convert_element_type, x, torch.float32)

    keys, values = (
        do(aten.reshape, do(aten.select, plane, 0, 0), [batch, kv, 1, 1, count, width])
        for plane, width in zip(operands.exact_first, (dim, value_dim), strict=True)
    )
    queries_first = do(aten.reshape, operands.q, [*shape, 1, dim])
    scores = do(aten.sum, do(aten.mul, wide(queries_first), wide(keys)), [-1])
    scores = do(aten.mul, do(aten.reshape, scores, [batch, heads, queries, count]), float(operands.scale))
    if operands.softcap > 0:
        scores = do(aten.mul, do(aten.tanh, do(aten.mul, scores, 1.0 / operands.softcap)), float(operands.softcap))
    scores = hold(do(aten.where, visible, do(aten.mul, scores, LOG2E), float("-inf")))
    top = do(aten.amax, scores, [-1], True)
    safe = do(aten.where, do(aten.eq, top, float("-inf")), 0.0, top)
    weight = hold(do(aten.exp2, do(aten.sub, scores, safe)))
    # [B or 1, 1, 1, 1, N, 1]: tokens that no query sees may hold anything.
    seen = do(aten.ne, do(aten.amax, do(prims.convert_element_type, visible, torch.int32), [2]), 0)
    seen = do(aten.unsqueeze, do(aten.unsqueeze, do(aten.unsqueeze, seen, 1), 1), -1)
    products = do(aten.mul, do(aten.reshape, weight, [*shape, count, 1]), do(aten.where, seen, wide(values), 0.0))
    summed = do(aten.reshape, do(aten.sum, products, [-2]), [batch, heads, queries, value_dim])
    return summed, top, do(aten.sum, weight, [-1], True)


def _visible(do: Do, operands: AttendOperands[Any], place: Any, count: int, batch: Any, capacity: Any, keep_tokens: Any) -> Any:
    """Return the mask of first tokens that each query sees, bool [1 or B, 1, S, N]."""
    def along_tokens(x: Any) -> Any:
        return do(aten.unsqueeze, do(aten.unsqueeze, x, 1), 1)

    def along_queries(x: Any) -> Any:
        return do(aten.unsqueeze, do(aten.unsqueeze, x, 1), 3)

    there = do(aten.logical_and, do(aten.ge, place, 0), do(aten.lt, place, capacity))
    if operands.keep is not None:
        there = do(aten.logical_and, there, do(aten.lt, place, keep_tokens))
        at = do(aten.where, there, place, 0)
        keep, at = (do(aten.expand, x, [batch, size]) for x, size in ((operands.keep, keep_tokens), (at, count)))
        there = do(aten.logical_and, there, do(aten.gather, keep, 1, at))
    found = do(aten.logical_and, along_tokens(there), do(aten.le, along_tokens(place), along_queries(operands.hi)))
    if operands.lo is not None:
        found = do(aten.logical_and, found, do(aten.ge, along_tokens(place), along_queries(operands.lo)))
    return found


def _iota(do: Do, count: Any, device: torch.device) -> Any:
    return do(prims.iota, count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False)
