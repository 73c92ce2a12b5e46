"""Asynchronous copies of a tile's words and scales into rings of shared memory. Device functions of Gluon."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.layouts import unswizzled
from kvcompile.lowering.gluon.tiles import copy_rows, copy_run, first_tokens
from kvcompile.lowering.host.gluon_api import gl, gluon


@gluon.jit
def plane_offsets(t0, pair, pages, ROW: gl.constexpr, BLOCK: gl.constexpr, C: gl.constexpr):
    """Return the offset of each warp's part of a tile in a plane, [WARPS] int64.

    Parts beyond the plane's end are clamped to its last part.
    """
    share: gl.constexpr = C.page_rows // C.tokens
    # In parts of a page, so that the compiler can infer the offsets' alignment.
    part = gl.minimum(first_tokens(t0, C.warps, C.tokens) // C.tokens, pages * share - 1)
    page = (part // share).to(gl.int64) * gl.num_programs(1) + pair
    if C.tokens >= BLOCK:
        return page * (C.page_rows // BLOCK * ROW) + part % share * (C.tokens // BLOCK * ROW)
    else:
        return page * (C.page_rows // BLOCK * ROW) + part % share // (BLOCK // C.tokens) * ROW


@gluon.jit
def fetch(slot, t0, pair, pages, planes, rings, KEY: gl.constexpr, VALUE: gl.constexpr, C: gl.constexpr):
    """Start asynchronous copies of the tile of keys and values at token ``t0`` into place ``slot`` of each ring in shared memory.

    ``planes``: words, scales and zero points of keys, then of values, in global memory; ``pair``: batch row and kv head.
    """
    halves: gl.constexpr = KEY.row // 2
    copy_rows(rings[0], slot, planes[0], plane_offsets(t0, pair, pages, halves, 1, C), C.warps, C.tokens, halves, 2)
    if KEY.block:
        at = plane_offsets(t0, pair, pages, KEY.dim, KEY.block, C)
        copy_run(rings[1], slot, planes[1], at, C.warps, KEY.dim)
        copy_run(rings[2], slot, planes[2], at, C.warps, KEY.dim)
    else:
        copy_run(rings[1], slot, planes[1], plane_offsets(t0, pair, pages, KEY.scales, 1, C), C.warps, C.tokens * KEY.scales)
    words: gl.constexpr = VALUE.row // VALUE.word
    copy_rows(rings[3], slot, planes[3], plane_offsets(t0, pair, pages, words, 1, C), C.warps, C.tokens, words, VALUE.word)
    at = plane_offsets(t0, pair, pages, VALUE.scales, 1, C)
    copy_run(rings[4], slot, planes[4], at, C.warps, C.tokens * VALUE.scales)
    if VALUE.zeros:
        copy_run(rings[5], slot, planes[5], at, C.warps, C.tokens * VALUE.scales)


@gluon.jit
def allocated(KEY: gl.constexpr, VALUE: gl.constexpr, C: gl.constexpr):
    """Allocate the rings in shared memory and return them: words, scales and zero points of keys, then of values.

    In place of a ring that the format lacks, another one is returned.
    """
    value_words_type: gl.constexpr = gl.int32 if VALUE.word == 4 else gl.int16
    k_words = gl.allocate_shared_memory(gl.int16, [C.stages, C.warps, C.tokens, KEY.row // 2], unswizzled(3))
    v_words = gl.allocate_shared_memory(value_words_type, [C.stages, C.warps, C.tokens, VALUE.row // VALUE.word], unswizzled(3))
    v_scales = gl.allocate_shared_memory(gl.float16, [C.stages, C.warps, C.tokens * VALUE.scales], unswizzled(2))
    v_zeros = v_scales
    if VALUE.zeros:
        v_zeros = gl.allocate_shared_memory(gl.float16, [C.stages, C.warps, C.tokens * VALUE.scales], unswizzled(2))
    if KEY.block:
        k_scales = gl.allocate_shared_memory(gl.float16, [C.stages, C.warps, KEY.dim], unswizzled(2))
        k_zeros = gl.allocate_shared_memory(gl.float16, [C.stages, C.warps, KEY.dim], unswizzled(2))
        return k_words, k_scales, k_zeros, v_words, v_scales, v_zeros
    else:
        k_scales = gl.allocate_shared_memory(gl.float16, [C.stages, C.warps, C.tokens * KEY.scales], unswizzled(2))
        return k_words, k_scales, k_scales, v_words, v_scales, v_zeros
