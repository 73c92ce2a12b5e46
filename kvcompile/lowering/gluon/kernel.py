"""The decode kernel over codes, one new token a batch row, in Gluon: the program of one split of one batch row and kv head.

    columns   query heads of one kv head, on the narrow side of products (8); with at most four heads, each is duplicated
    tile      WARPS * TOKENS tokens; every warp has its own TOKENS, softmax and sums, and warps exchange nothing
    ring      STAGES buffers of shared memory, into which words and scales are copied ahead of their use
    split     program_id(0): its share of the tokens (``extent``). With ``exact_newest`` the last one attends to the newest tokens
    m         subtracted from scores in the exponent. Not the maximum: m is raised by octaves, when a probability times a scale
              might overflow float16, which rarely happens after a few tiles; m changes results only by rounding
    output    partial sums of each warp, for ``merge``
"""

# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.exact_tokens import attend_exact
from kvcompile.lowering.gluon.extent import extent, kept_extent, visible
from kvcompile.lowering.gluon.layouts import (
    by_thread,
    key_scales,
    key_words,
    of_columns,
    of_rows,
    operand,
    products,
    several,
    value_scales,
    value_words,
)
from kvcompile.lowering.gluon.merge import LOWEST, let_next_begin, write_channels, write_slot
from kvcompile.lowering.gluon.scores import folded_scores, offset_scores, queries_of, scaled_scores
from kvcompile.lowering.gluon.smem_pipeline import allocated, fetch
from kvcompile.lowering.gluon.tiles import (
    bytes_apart,
    exp2,
    first_tokens,
    larger,
    largest,
    log2,
    over_columns,
    taken_apart,
    value_operand,
    weights,
)
from kvcompile.lowering.host.gluon_api import async_copy, barrier, gl, gluon, mma_v2

TOP = gl.constexpr(32768.0)
"""Limit of a probability times a scale in float16."""

RAISED = gl.constexpr(11.0)
"""log2 of the largest probability times a scale after m was raised: four octaves below TOP, so that m is not raised again soon."""


@gluon.jit(
    do_not_specialize=[
        "hi_batch", "lo_batch", "keep_batch", "kept_batch", "base_batch", "recent_rows", "batch", "pages", "keep_tokens", "shares",
    ]
)
def attend(
    Q, HI, LO, KEEP, KEPT, K_WORDS, K_SCALES, K_ZEROS, V_WORDS, V_SCALES, V_ZEROS, RECENT_K, RECENT_V, BASE, SUMS, TOPS,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, hi_batch, lo_batch, keep_batch, kept_batch, base_batch, recent_rows,
    batch, pages, keep_tokens, shares, scale, KEY: gl.constexpr, VALUE: gl.constexpr, C: gl.constexpr,
):
    """Attend to one split's tokens of one batch row and kv head; write its partial sums to its warps' slots of SUMS and TOPS (``merge``).

    See the module. Planes: [pages, batch, kv heads, rows, width], contiguous; ``scale`` is for exponents of base 2.
    """
    PRODUCTS: gl.constexpr = len(VALUE.products)
    CHUNKS: gl.constexpr = VALUE.chunks
    SETS: gl.constexpr = VALUE.sets
    if C.overlap:
        let_next_begin()
    split, pair = gl.program_id(0), gl.program_id(1)
    batch_row, head = pair // C.kv_heads, pair % C.kv_heads
    capacity = pages * C.page_rows
    if C.keep:
        capacity = gl.minimum(capacity, keep_tokens)
    start, stop = visible(HI, LO, batch_row, hi_batch, lo_batch, capacity, C)
    splits = gl.num_programs(0) - C.exact_newest
    first, until, base, tiles, active = extent(
        HI, LO, BASE, batch_row, start, stop, batch, hi_batch, lo_batch, base_batch, capacity, splits, shares, C.warps, C
    )
    size: gl.constexpr = C.warps * C.tokens
    slots = gl.num_programs(0) * C.warps
    Q += batch_row * q_batch + head * C.group * q_head
    if split >= active:
        if C.exact_newest:
            if split == splits:
                attend_exact(
                    Q, KEEP, RECENT_K, RECENT_V, SUMS, TOPS, pair * slots + active * C.warps, batch_row, head, q_head, recent_rows, k_batch,
                    k_head, k_row, v_batch, v_head, v_row, keep_batch, keep_tokens, scale, start, stop, base, KEY, C,
                )
        return

    planes = (
        K_WORDS.to(gl.pointer_type(gl.int16), bitcast=True), K_SCALES, K_ZEROS,
        V_WORDS.to(gl.pointer_type(gl.int32 if VALUE.word == 4 else gl.int16), bitcast=True), V_SCALES, V_ZEROS,
    )
    rings = allocated(KEY, VALUE, C)
    begin = split * tiles // active
    end = (split + 1) * tiles // active
    clear = start
    if C.keep:
        # Padding comes first: its whole tiles are skipped, and tiles behind it need no mask.
        kept = kept_extent(KEPT + batch_row * kept_batch, first + begin * size, gl.minimum(first + end * size, until), C.warps)
        begin = gl.minimum(gl.maximum(begin, (kept[0] - first) // size), end)
        clear = gl.maximum(start, kept[1])
    for ahead in gl.static_range(C.stages - 1):
        if begin + ahead < end:
            fetch(ahead, first + (begin + ahead) * size, pair, pages, planes, rings, KEY, VALUE, C)
        async_copy.commit_group()
    qs, shrunk = queries_of(Q, q_head, KEY, C)
    scale = shrunk * (scale * 2.0 ** KEY.unit)
    starts = ()
    if KEY.block == 0:
        apart = ()
        for piece in gl.static_range(KEY.chunks * KEY.parts):
            apart = apart + (bytes_apart(qs[piece], C.warps, KEY),)
        qs = apart
        starts = offset_scores(qs, KEY, C)

    sums = ()
    for _ in gl.static_range(PRODUCTS):
        sums = sums + (gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=products(C.warps)),)
    shifts = ()
    if VALUE.shifted:
        for _ in gl.static_range(SETS):
            shifts = shifts + (gl.full([C.warps, 16, 8], 0.0, gl.float32, layout=products(C.warps)),)
    ones = gl.full([C.warps, 16, C.tokens], 1.0, gl.float16, layout=operand(C.warps, 0, 2))
    m = gl.full([C.warps, 8], LOWEST, gl.float32, layout=of_columns(C.warps))
    l = gl.full([C.warps, 8, 8], 0.0, gl.float32, layout=by_thread(C.warps))
    lanes: gl.constexpr = by_thread(C.warps)
    row = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, of_rows(C.warps)))
    slot = 0
    for step in range(begin, end):
        t0 = first + step * size
        async_copy.wait_group(C.stages - 2)
        if C.warps > 1:
            barrier()
        words = rings[0].index(slot).load(key_words(C.warps, C.tokens, KEY.row // 2, KEY.chunk))
        words = words.reshape([C.warps, C.tokens, KEY.chunks, KEY.chunk // 2]).permute([0, 1, 3, 2])
        words = taken_apart(words, KEY.chunks)
        if KEY.block:
            scores = folded_scores(words, rings[1].index(slot), rings[2].index(slot), qs, KEY, C)
        else:
            scales = rings[1].index(slot).reshape([C.warps, C.tokens, 1, KEY.scales]).load(key_scales(C.warps, C.tokens, KEY.scales))
            scores = scaled_scores(words, taken_apart(scales, KEY.scales), qs, starts, KEY, C)
        within: gl.constexpr = value_scales(C.warps, C.tokens, VALUE.halves, VALUE.sets)
        form: gl.constexpr = [C.warps, C.tokens, VALUE.halves, VALUE.sets]
        if (t0 + size > until) or (t0 < clear):
            token = first_tokens(t0, C.warps, C.tokens)[:, None] + row[None, :]
            valid = (token >= start) & (token < until)
            if C.keep:
                valid = valid & (gl.load(KEEP + batch_row * keep_batch + token, mask=token < keep_tokens, other=0) != 0)
            scores = gl.where(valid[:, :, None], scores, float("-inf"))
            # Scales of hidden tokens may be anything: they are set to zero in shared memory, where all threads read them.
            valid = gl.convert_layout(valid, gl.SliceLayout(2, gl.SliceLayout(3, within)), assert_trivial=True)
            valid = gl.expand_dims(gl.expand_dims(valid, 2), 3)
            place = rings[4].index(slot).reshape(form)
            place.store(gl.where(valid, place.load(within), 0.0))
            if VALUE.zeros:
                place = rings[5].index(slot).reshape(form)
                place.store(gl.where(valid, place.load(within), 0.0))
            barrier()
        v_scales = rings[4].index(slot).reshape(form).load(within)
        v_zeros = v_scales
        if VALUE.zeros:
            v_zeros = rings[5].index(slot).reshape(form).load(within)

        # Whether m must be raised, and by how many octaves.
        highest = gl.max(scores.reshape([C.warps, C.tokens // 8, 8, 8]), 1)
        highest = gl.convert_layout(highest, lanes, assert_trivial=True)
        highest = highest * gl.convert_layout(scale, gl.SliceLayout(1, lanes), assert_trivial=True)[:, None, :]
        big = largest(v_scales, C.tokens)
        if VALUE.zeros:
            big = larger(big, largest(v_zeros, C.tokens))
        big = over_columns(gl.maximum(gl.max(big.to(gl.float32), 3), 1.0), C.warps, VALUE)
        excess = exp2(highest - gl.convert_layout(m, gl.SliceLayout(1, lanes), assert_trivial=True)[:, None, :]) * big - TOP
        # Compared as integers, whose sign is the float's; a (positive) NaN counts as too large.
        if gl.max(excess.to(gl.int32, bitcast=True).reshape([C.warps * 64]), 0) > 0:
            # By the largest scale of all columns: duplicated queries must have equal m.
            widest = gl.full([C.warps, 8], gl.max(big.reshape([C.warps * 64]), 0), gl.float32, layout=gl.SliceLayout(1, lanes))
            most = gl.max(highest, 1) + log2(widest)
            raised = gl.maximum(m, gl.convert_layout(most, of_columns(C.warps), assert_trivial=True) - RAISED)
            lowered = exp2(m - raised)
            m = raised
            l = l * gl.convert_layout(lowered, gl.SliceLayout(1, lanes), assert_trivial=True)[:, None, :]
            kept_sums = ()
            for at in gl.static_range(PRODUCTS):
                kept_sums = kept_sums + (sums[at] * lowered[:, None, :],)
            sums = kept_sums
            kept_shifts = ()
            if VALUE.shifted:
                for at in gl.static_range(SETS):
                    kept_shifts = kept_shifts + (shifts[at] * lowered[:, None, :],)
            shifts = kept_shifts

        p = exp2(scores * scale[:, None, :] - m[:, None, :])
        l += gl.convert_layout(gl.sum(p.reshape([C.warps, C.tokens // 8, 8, 8]), 1), lanes, assert_trivial=True)
        p = p.to(gl.float16)
        weighted = ()
        sets = taken_apart(v_scales, VALUE.sets)
        for at in gl.static_range(SETS):
            weighted = weighted + (weights(p, sets[at], C.warps, C.tokens, VALUE),)
        words = rings[3].index(slot).load(value_words(C.warps, C.tokens, VALUE.row // VALUE.word))
        words = taken_apart(words.reshape([C.warps, C.tokens, VALUE.chunks, 8]).permute([0, 3, 1, 2]), VALUE.chunks)
        codes = ()
        for chunk in gl.static_range(CHUNKS):
            codes = codes + (gl.inline_asm_elementwise(
                VALUE.assembly, VALUE.constraints, [words[chunk]], dtype=(gl.float16,) * (VALUE.word * VALUE.parts), is_pure=True, pack=2
            ),)
        grown = ()
        for at in gl.static_range(PRODUCTS):
            found = codes[VALUE.products[at][0]]
            rows = value_operand(found[VALUE.products[at][1]], found[VALUE.products[at][2]], C.warps, C.tokens)
            grown = grown + (mma_v2(rows, weighted[VALUE.set_of[at]], sums[at]),)
        sums = grown
        if VALUE.zeros:
            weighted = ()
            sets = taken_apart(v_zeros, VALUE.sets)
            for at in gl.static_range(SETS):
                weighted = weighted + (weights(p, sets[at], C.warps, C.tokens, VALUE),)
        if VALUE.shifted:
            grown = ()
            for at in gl.static_range(SETS):
                grown = grown + (mma_v2(ones, weighted[at], shifts[at]),)
            shifts = grown
        if step + C.stages - 1 < end:
            fetch((slot + C.stages - 1) % C.stages, t0 + (C.stages - 1) * size, pair, pages, planes, rings, KEY, VALUE, C)
        async_copy.commit_group()
        slot = (slot + 1) % C.stages

    results: gl.constexpr = by_thread(C.warps)
    upper = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, products(C.warps))))[None, :, None] // 8
    second = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, results)))[None, None, :] // 4 == 1
    warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, several(C.warps, VALUE.word)))))
    here = pair * slots + split * C.warps + warp
    halves = ()
    for at in gl.static_range(PRODUCTS):
        x = sums[at] * gl.where(upper == 0, VALUE.units[at][0], VALUE.units[at][1])
        if VALUE.shifted:
            x += shifts[VALUE.set_of[at]] * (1.0 if VALUE.zeros else -VALUE.offset)
        low, high = gl.split(x.reshape([C.warps, 2, 8, 8]).permute([0, 2, 3, 1]))
        low = gl.convert_layout(low, results, assert_trivial=True)
        high = gl.convert_layout(high, results, assert_trivial=True)
        if VALUE.halves == 2:
            halves = halves + (gl.where(second, high, low),)
        else:
            halves = halves + (low, high)
    WRITTEN: gl.constexpr = len(VALUE.written)
    for at in gl.static_range(WRITTEN):
        write_channels(SUMS, here, halves, at, VALUE, C)
    write_slot(TOPS, pair * slots + split * C.warps, m, l, C)
