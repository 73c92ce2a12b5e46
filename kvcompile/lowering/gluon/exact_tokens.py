"""The split that attends to the newest tokens, in full precision. Device functions of Gluon."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.layouts import by_thread, of_columns, of_rows, operand, products, value_words
from kvcompile.lowering.gluon.merge import LOWEST, write_slot
from kvcompile.lowering.gluon.tiles import exp2, first_tokens, taken_apart, turned, value_operand
from kvcompile.lowering.host.gluon_api import gl, gluon, mma_v2


@gluon.jit
def attend_exact(
    Q, KEEP, K, V, SUMS, TOPS, slot, batch_row, head, q_head, rows, k_batch, k_head, k_row, v_batch, v_head, v_row, keep_batch,
    keep_tokens, scale, start, stop, base, KEY: gl.constexpr, C: gl.constexpr,
):
    """Attend to the newest tokens, row j of K and V at position ``base`` + j; warp w writes slot ``slot`` + w of SUMS and TOPS (``merge``).

    ``rows`` tokens of one batch row and kv head, 16 tokens a warp and step; ``scale`` is for exponents of base 2.
    """
    PIECES: gl.constexpr = KEY.dim // 64
    WORDS: gl.constexpr = C.dim // 16
    results: gl.constexpr = products(C.warps)
    first_layout: gl.constexpr = operand(C.warps, 0, 8)
    second_layout: gl.constexpr = operand(C.warps, 1, 8)
    words_layout: gl.constexpr = value_words(C.warps, 16, C.dim // 2)
    K += batch_row * k_batch + head * k_head
    V = (V + (batch_row * v_batch + head * v_head)).to(gl.pointer_type(gl.int32), bitcast=True)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, second_layout)))
    at = (gl.minimum(column % C.rows, C.group - 1) * q_head)[None, None, :]
    channel = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, second_layout)))[None, :, None]
    warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, second_layout)))[:, None, None]
    qs = ()
    for piece in gl.static_range(PIECES):
        qs = qs + (gl.load(Q + at + (64 * piece + channel) + 0 * warp),)
    m = gl.full([C.warps, 8], LOWEST, gl.float32, layout=of_columns(C.warps))
    l = gl.full([C.warps, 8, 8], 0.0, gl.float32, layout=by_thread(C.warps))
    lanes: gl.constexpr = by_thread(C.warps)
    sums = ()
    for _ in gl.static_range(WORDS):
        sums = sums + (gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=results),)
    k_token = first_tokens(0, C.warps, 16)[:, None] + gl.arange(0, 16, layout=gl.SliceLayout(0, of_rows(C.warps)))[None, :]
    k_channel = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, first_layout)))[None, None, :]
    v_word = gl.arange(0, C.dim // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, words_layout)))[None, None, :]
    v_token = gl.convert_layout(k_token, gl.SliceLayout(2, words_layout))
    a_token = gl.convert_layout(k_token, gl.SliceLayout(2, first_layout))
    for begin in range(0, gl.minimum(gl.maximum(stop - base, 0), rows), 16 * C.warps):
        scores = gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=results)
        for piece in gl.static_range(PIECES):
            j = (begin + a_token)[:, :, None]
            keys = gl.load(K + j * k_row + (64 * piece + k_channel), mask=j < rows, other=0.0)
            scores = mma_v2(keys, qs[piece], scores)
        scores = scores * scale
        j = begin + k_token
        token = base + j
        kept = (j < rows) & (token >= start) & (token < stop)
        if C.keep:
            kept = kept & (gl.load(KEEP + batch_row * keep_batch + token, mask=kept & (token < keep_tokens), other=0) != 0)
        scores = gl.where(kept[:, :, None], scores, float("-inf"))
        highest = gl.convert_layout(gl.max(scores.reshape([C.warps, 2, 8, 8]), 1), lanes, assert_trivial=True)
        raised = gl.maximum(m, gl.convert_layout(gl.max(highest, 1), of_columns(C.warps), assert_trivial=True))
        lowered = exp2(m - raised)
        m = raised
        p = exp2(scores - m[:, None, :])
        l = l * gl.convert_layout(lowered, gl.SliceLayout(1, lanes), assert_trivial=True)[:, None, :]
        l += gl.convert_layout(gl.sum(p.reshape([C.warps, 2, 8, 8]), 1), lanes, assert_trivial=True)
        weighted = turned(p.to(Q.dtype.element_ty), C.warps, 16)
        inside = gl.convert_layout(kept, gl.SliceLayout(2, words_layout))[:, :, None]
        words = gl.load(V + (begin + v_token)[:, :, None] * (v_row // 2) + v_word, mask=inside, other=0)
        words = taken_apart(words.reshape([C.warps, 16, WORDS, 8]).permute([0, 3, 1, 2]), WORDS)
        grown = ()
        for at_word in gl.static_range(WORDS):
            low, high = gl.inline_asm_elementwise(
                "{ .reg .b32 a, b; mov.b32 a, $2; mov.b32 b, $3; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }", "=&r,=&r,r,r",
                [words[at_word]], dtype=(Q.dtype.element_ty, Q.dtype.element_ty), is_pure=True, pack=2,
            )
            grown = grown + (mma_v2(value_operand(low, high, C.warps, 16), weighted, sums[at_word] * lowered[:, None, :]),)
        sums = grown
    r16 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, results)))[None, :, None]
    n8 = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, results)))[None, None, :]
    w = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, results)))[:, None, None]
    here = (slot + w).to(gl.int64) * (C.kept * C.dim) + n8 * C.dim + (r16 % 8 * 2 + r16 // 8)
    for at_word in gl.static_range(WORDS):
        gl.store(SUMS + here + 16 * at_word, sums[at_word], mask=(n8 < C.kept) & (w >= 0) & (r16 >= 0))
    write_slot(TOPS, slot, m, l, C)
