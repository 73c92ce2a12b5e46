"""Kernel of what each token got from all heads, out of the scores of smartkv's attention: see the package."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

from kvcompile.lowering.smartkv.kernels.tokens import PAGE
from kvcompile.lowering.smartkv.kernels.values import peak_of


@triton.jit
def give(
    SCORES, HIGHEST, WHOLE, HEADS, FIRST, IMPORTANCE, pages, rows, tokens, K: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, DECAY: tl.constexpr, HEAD_DECAY: tl.constexpr, LEAST: tl.constexpr,
):
    """Move IMPORTANCE [N, B, PAGE, 3] on by what each token got. Grid: pages of tokens, batch rows. KV, GROUP: K, G as powers of two."""
    page, b = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, PAGE)
    position = page * PAGE + row
    # Nobody wrote scores behind the last page that tokens enter.
    ok = position < tl.load(FIRST).to(tl.int32) + pages * PAGE
    h = tl.arange(0, KV * GROUP)
    k, g = h // GROUP, h % GROUP
    there = (k < K) & (g < G)
    at = IMPORTANCE + ((page * rows + b).to(tl.int64) * PAGE + row) * 3
    plain, by_heads = tl.load(at), tl.load(at + 1)
    seen = tl.zeros([PAGE], tl.int32)
    head = tl.load(HEADS + b * K + tl.arange(0, KV), mask=tl.arange(0, KV) < K, other=1.0)
    head = tl.where(head == 0, 1.0, head)
    for query in tl.static_range(S):
        mine = (b * K + k) * R + query * G + g
        top = tl.load(HIGHEST + mine, mask=there, other=float("-inf"))
        total = tl.load(WHOLE + mine, mask=there, other=0.0)
        base = tl.where(top == float("-inf"), 0.0, top)
        where = ((b * K + k).to(tl.int64) * tokens)[:, None] + position[None, :]
        x = tl.load(SCORES + where * (G * S) + query * G + g[:, None], mask=there[:, None] & ok[None, :], other=float("-inf"))
        share = tl.where((total == 0)[:, None], 0.0, tl.exp2(x - base[:, None]) / total[:, None])
        share = tl.where((share == share) & (share < float("inf")), share, 0.0)
        seen |= tl.max((share > 0).to(tl.int32), 0)
        mass = tl.sum(tl.reshape(share, [KV, GROUP, PAGE]), 1) / G
        measure = tl.sum(tl.reshape(tl.where(there, peak_of(top, total), 0.0), [KV, GROUP]), 1) / G
        head = HEAD_DECAY * head + (1 - HEAD_DECAY) * measure
        plain = DECAY * plain + (1 - DECAY) * tl.sum(mass, 0) / K
        by_heads = DECAY * by_heads + (1 - DECAY) * tl.sum(head[:, None] * mass, 0) / K
    tl.store(at, tl.where(seen > 0, tl.maximum(plain, LEAST), plain))
    tl.store(at + 1, by_heads)
