"""Steps over one tile of tokens: copies, codes as operands, weights. Device functions of Gluon."""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, N803, N806, RET505, RUF005, SIM102 - kernels: operands are capitals, tuples grow by sums, compile-time branches.

from __future__ import annotations

from kvcompile.lowering.gluon.layouts import (
    by_half,
    by_thread,
    columns_apart,
    flat_copies,
    of_rows,
    operand,
    products,
    row_copies,
)
from kvcompile.lowering.host.gluon_api import async_copy, gl, gluon


@gluon.jit
def exp2(x):
    """Return 2**x of float32, by one instruction; subnormal results become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """Return log2 of float32, by one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def times(a, b):
    """Return the elementwise product of two float16 tensors, by instructions on two elements."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def larger(a, b):
    """Return the elementwise maximum of |a| and |b|, float16, by instructions on two elements; NaN is ignored."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; abs.f16x2 a, $1; abs.f16x2 b, $2; max.f16x2 $0, a, b; }", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True,
        pack=2,
    )


@gluon.jit
def taken_apart(x, count: gl.constexpr):
    """Return the slices of ``x`` along the last of its four dims, as a tuple of tensors; ``count``: its size, a power of two."""
    if count == 1:
        return (x.reshape([x.shape[0], x.shape[1], x.shape[2]]),)
    else:
        low, high = gl.split(x.reshape([x.shape[0], x.shape[1], x.shape[2], 2, count // 2]).permute([0, 1, 2, 4, 3]))
        return taken_apart(low, count // 2) + taken_apart(high, count // 2)


@gluon.jit
def first_tokens(t0, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Return the first token of each warp's part of a tile, [WARPS]."""
    return t0 + TOKENS * gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_rows(WARPS)))


@gluon.jit
def copy_rows(ring, slot, plane, at, WARPS: gl.constexpr, ROWS: gl.constexpr, ELEMENTS: gl.constexpr, SIZE: gl.constexpr):
    """Start copying ROWS consecutive rows for each warp, from offset ``at`` on, into a ring's slot [WARPS, ROWS, ELEMENTS]."""
    layout: gl.constexpr = row_copies(WARPS, ELEMENTS, SIZE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    element = gl.arange(0, ELEMENTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = gl.convert_layout(at, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    pointers = plane + at[:, None, None] + (row[None, :, None] * ELEMENTS + element[None, None, :])
    async_copy.async_copy_global_to_shared(ring.index(slot), pointers)


@gluon.jit
def copy_run(ring, slot, plane, at, WARPS: gl.constexpr, HALVES: gl.constexpr):
    """Start copying HALVES 16-bit numbers for each warp, from offset ``at`` on, into a ring's slot [WARPS, HALVES]."""
    layout: gl.constexpr = flat_copies(WARPS, HALVES)
    element = gl.arange(0, HALVES, layout=gl.SliceLayout(0, layout))
    at = gl.convert_layout(at, gl.SliceLayout(1, layout))
    async_copy.async_copy_global_to_shared(ring.index(slot), plane + at[:, None] + element[None, :])


@gluon.jit
def key_operands(words, WARPS: gl.constexpr, KEY: gl.constexpr):
    """Return the codes of one chunk of words [WARPS, tokens, chunk / 2]: an operand [WARPS, tokens, chunk] for every part.

    Its columns are the even bytes of the chunk, then the odd ones.
    """
    PARTS: gl.constexpr = KEY.parts
    layout: gl.constexpr = operand(WARPS, 0, KEY.chunk // 8)
    words = gl.convert_layout(words, layout, assert_trivial=True)
    halves = gl.inline_asm_elementwise(
        KEY.assembly, KEY.constraints, [words], dtype=(gl.float16,) * (2 * KEY.parts), is_pure=True, pack=2
    )
    found = ()
    for part in gl.static_range(PARTS):
        both = gl.join(halves[part], halves[KEY.parts + part]).permute([0, 1, 3, 2])
        both = both.reshape([WARPS, both.shape[1], KEY.chunk])
        found = found + (gl.convert_layout(both, layout, assert_trivial=True),)
    return found


@gluon.jit
def bytes_apart(x, WARPS: gl.constexpr, KEY: gl.constexpr):
    """Return a chunk of queries [WARPS, chunk, 8], given in natural order, in the channel order of ``key_operands``."""
    x = x.reshape([WARPS, KEY.chunk // 2, 2, 8]).permute([0, 2, 1, 3]).reshape([WARPS, KEY.chunk, 8])
    return gl.convert_layout(x, operand(WARPS, 1, KEY.chunk // 8), assert_trivial=True)


@gluon.jit
def repeated(x, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Return results of 16 rows [WARPS, 16, 8] repeated for every 16 rows of [WARPS, TOKENS, 8]."""
    x = x.reshape([WARPS, 1, 16, 8]).broadcast_to([WARPS, TOKENS // 16, 16, 8]).reshape([WARPS, TOKENS, 8])
    return gl.convert_layout(x, products(WARPS), assert_trivial=True)


@gluon.jit
def turned(x, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Return 16-bit floats [WARPS, TOKENS, 8], laid out as results, as the second operand of a product over tokens, by 8 x 8 transposes."""
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )
    # The threads' contents were transposed, so transpose the dims as well: the tensor stays equal.
    x = x.reshape([WARPS, TOKENS // 8, 8, 8]).permute([0, 1, 3, 2]).reshape([WARPS, TOKENS, 8])
    return gl.convert_layout(x, operand(WARPS, 1, 2), assert_trivial=True)


@gluon.jit
def value_operand(low, high, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Return two sets of eight rows [WARPS, 8, TOKENS] as the first operand of a product over tokens, ``low`` as rows 0 to 7."""
    x = gl.join(low, high).permute([0, 3, 1, 2]).reshape([WARPS, 16, TOKENS])
    return gl.convert_layout(x, operand(WARPS, 0, 2), assert_trivial=True)


@gluon.jit
def weights(p, scales, WARPS: gl.constexpr, TOKENS: gl.constexpr, VALUE: gl.constexpr):
    """Return float16 probabilities times one set of scales [WARPS, TOKENS, halves], as the second operand of the product with values."""
    if VALUE.halves == 2:
        apart: gl.constexpr = columns_apart(WARPS, TOKENS)
        scales = gl.convert_layout(scales, gl.SliceLayout(3, gl.SliceLayout(4, apart)), assert_trivial=True)
        scales = gl.expand_dims(gl.expand_dims(scales, 3), 4).broadcast_to([WARPS, TOKENS, 2, 2, 2]).reshape([WARPS, TOKENS, 8])
        scales = gl.convert_layout(scales, products(WARPS), assert_trivial=True)
    else:
        scales = gl.convert_layout(scales.reshape([WARPS, TOKENS]), of_rows(WARPS), assert_trivial=True)
        scales = scales[:, :, None].broadcast_to([WARPS, TOKENS, 8])
    return turned(times(p, scales), WARPS, TOKENS)


@gluon.jit
def largest(scales, TOKENS: gl.constexpr):
    """Return the largest magnitudes over each thread's tokens: [WARPS, TOKENS, halves, sets] -> [WARPS, 8, halves, sets]."""
    if TOKENS == 8:
        return scales
    else:
        shape: gl.constexpr = scales.shape
        low, high = gl.split(scales.reshape([shape[0], 2, TOKENS // 2, shape[2], shape[3]]).permute([0, 2, 3, 4, 1]))
        return largest(larger(low, high), TOKENS // 2)


@gluon.jit
def over_columns(x, WARPS: gl.constexpr, VALUE: gl.constexpr):
    """Return x [WARPS, 8, halves] broadcast to each column of results, [WARPS, 8, 8], in the layout ``by_thread``."""
    if VALUE.halves == 2:
        x = gl.convert_layout(x, gl.SliceLayout(3, gl.SliceLayout(4, by_half(WARPS))), assert_trivial=True)
        x = gl.expand_dims(gl.expand_dims(x, 3), 4).broadcast_to([WARPS, 8, 2, 2, 2]).reshape([WARPS, 8, 8])
        return gl.convert_layout(x, by_thread(WARPS), assert_trivial=True)
    else:
        x = gl.convert_layout(x.reshape([WARPS, 8]), gl.SliceLayout(2, by_thread(WARPS)), assert_trivial=True)
        return x[:, :, None].broadcast_to([WARPS, 8, 8])
