"""Products of queries with the codes of keys, with scales and zero points applied. Device functions of Gluon."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.layouts import eight_rows, of_columns, of_rows, operand, products
from kvcompile.lowering.gluon.tiles import bytes_apart, key_operands, repeated, times
from kvcompile.lowering.host.gluon_api import gl, gluon, mma_v2


@gluon.jit
def queries_of(Q, q_head, KEY: gl.constexpr, C: gl.constexpr):
    """Return one kv head's queries, and the factor that undoes their scaling in scores, float32 [WARPS, 8].

    Queries: one float16 block [WARPS, channels of a chunk, 8] for each (chunk, part), as ``KEY.firsts`` orders them, scaled to magnitudes
    of at most one and down by the octaves ``KEY.lower``. All warps hold equal ones. Columns are the head's query heads, repeated if there
    are fewer.
    """
    layout: gl.constexpr = operand(C.warps, 1, KEY.chunk // 4)
    channel = gl.arange(0, KEY.chunk, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    at = gl.minimum(column % C.rows, C.group - 1) * q_head
    found = ()
    top = gl.full([C.warps, 8], 0.0, gl.float32, layout=gl.SliceLayout(1, layout))
    for piece in gl.static_range(KEY.chunks * KEY.parts):
        x = gl.load(Q + at[None, None, :] + (KEY.firsts[piece] + channel)[None, :, None] + 0 * warp[:, None, None]).to(gl.float32)
        found = found + (x,)
        top = gl.maximum(top, gl.max(gl.abs(x), 1))
    # Exponent of the largest magnitude, clamped away from zero and infinity; its power of two scales the row to at most one.
    exponent = gl.minimum(gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 255, 4), 250)
    shrink = ((253 - exponent) << 23).to(gl.float32, bitcast=True)
    given = ()
    for piece in gl.static_range(KEY.chunks * KEY.parts):
        x = found[piece] * (shrink * 2.0 ** -KEY.lower[piece % KEY.parts])[:, None, :]
        given = given + (x.to(gl.float16),)
    exponent = gl.convert_layout(exponent, of_columns(C.warps))
    return given, ((exponent + 1) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def offset_scores(qs, KEY: gl.constexpr, C: gl.constexpr):
    """Return, for each group of channels, the score to add for the codes' offset, [WARPS, 16, 8] with equal rows."""
    GROUPS: gl.constexpr = KEY.scales
    layout: gl.constexpr = operand(C.warps, 0, KEY.chunk // 8)
    found = ()
    for group in gl.static_range(GROUPS):
        start = gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=products(C.warps))
        if KEY.offset:
            for piece in gl.static_range(KEY.chunks * KEY.parts):
                if KEY.groups[piece] == group:
                    less = -KEY.offset * 2.0 ** (KEY.lower[piece % KEY.parts] - KEY.unit)
                    start = mma_v2(gl.full([C.warps, 16, KEY.chunk], less, gl.float16, layout=layout), qs[piece], start)
        found = found + (start,)
    return found


@gluon.jit
def scaled_scores(words, scales, qs, starts, KEY: gl.constexpr, C: gl.constexpr):
    """Return products of queries with codes that have token scales, each group's product times its scale: [WARPS, TOKENS, 8]."""
    GROUPS: gl.constexpr = KEY.scales
    CHUNKS: gl.constexpr = KEY.chunks
    codes = ()
    for chunk in gl.static_range(CHUNKS):
        codes = codes + key_operands(words[chunk], C.warps, KEY)
    scores = gl.full([C.warps, C.tokens, 8], 0.0, gl.float32, layout=products(C.warps))
    for group in gl.static_range(GROUPS):
        part = repeated(starts[group], C.warps, C.tokens)
        for piece in gl.static_range(KEY.chunks * KEY.parts):
            if KEY.groups[piece] == group:
                part = mma_v2(codes[piece], qs[piece], part)
        scale = gl.convert_layout(scales[group].reshape([C.warps, C.tokens]), of_rows(C.warps), assert_trivial=True)
        scores += part * scale.to(gl.float32)[:, :, None]
    return scores


@gluon.jit
def zero_scores(zeros, qs, KEY: gl.constexpr, C: gl.constexpr):
    """Return products of queries with the zero points of a tile's block, [WARPS, 16, 8] with equal rows."""
    half: gl.constexpr = gl.SliceLayout(1, eight_rows(C.warps, KEY.chunk))
    total = gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=products(C.warps))
    LOWERED: gl.constexpr = len(KEY.lowered)
    for each in gl.static_range(LOWERED):
        found = gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=products(C.warps))
        for piece in gl.static_range(KEY.chunks * KEY.parts):
            if KEY.lower[piece % KEY.parts] == KEY.lowered[each]:
                rows = zeros.slice(KEY.firsts[piece], KEY.chunk, 1).load(half)[:, None, :].broadcast_to([C.warps, 8, KEY.chunk])
                rows = gl.join(rows, rows).permute([0, 3, 1, 2]).reshape([C.warps, 16, KEY.chunk])
                rows = gl.convert_layout(rows, operand(C.warps, 0, KEY.chunk // 4), assert_trivial=True)
                found = mma_v2(rows, qs[piece], found)
        total += found * 2.0 ** (KEY.lowered[each] - KEY.unit)
    return total


@gluon.jit
def block_scores(words, scales, start, qs, KEY: gl.constexpr, C: gl.constexpr):
    """Return products of queries, times a block's scales, with a tile's codes, plus ``start``: [WARPS, tokens, 8].

    ``words``: [WARPS, tokens, chunk / 2] for each chunk.
    """
    SPANS: gl.constexpr = len(KEY.span_octaves)
    PARTS: gl.constexpr = KEY.parts
    CHUNKS: gl.constexpr = KEY.chunks
    column: gl.constexpr = gl.SliceLayout(2, operand(C.warps, 1, KEY.chunk // 4))
    sums = (start,)
    for _ in gl.static_range(SPANS - 1):
        sums = sums + (gl.full(start.shape, 0.0, gl.float32, layout=products(C.warps)),)
    for chunk in gl.static_range(CHUNKS):
        codes = key_operands(words[chunk], C.warps, KEY)
        for part in gl.static_range(PARTS):
            scale = scales.slice(KEY.firsts[chunk * KEY.parts + part], KEY.chunk, 1).load(column)
            q = times(qs[chunk * KEY.parts + part], scale[:, :, None].broadcast_to([C.warps, KEY.chunk, 8]))
            grown = ()
            for span in gl.static_range(SPANS):
                if KEY.spans[part] == span:
                    grown = grown + (mma_v2(codes[part], bytes_apart(q, C.warps, KEY), sums[span]),)
                else:
                    grown = grown + (sums[span],)
            sums = grown
    total = sums[0]
    for span in gl.static_range(1, SPANS):
        total += sums[span] * 2.0 ** KEY.span_octaves[span]
    return total


@gluon.jit
def folded_scores(words, scales, zeros, qs, KEY: gl.constexpr, C: gl.constexpr):
    """Return products of queries with codes that have scales and zero points of a block of tokens: [WARPS, TOKENS, 8].

    ``scales``, ``zeros``: slots of the rings, [WARPS, dim]; a tile lies within one block.
    """
    start = repeated(zero_scores(zeros, qs, KEY, C), C.warps, C.tokens)
    return block_scores(words, scales, start, qs, KEY, C)
