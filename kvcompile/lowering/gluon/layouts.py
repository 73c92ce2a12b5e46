"""Layouts of the kernel's tiles: the mapping of elements to threads.

A program has WARPS warps with separate tokens, so the first dim of every tile is the warp. A product m16n8k16 takes its operands as
FRAGMENTS: thread 4 * g + t of a warp holds rows g and g + 8, and pairs of neighbours along the reduced dim at 2t and 2t + 8. The bases
below (for each power of two of a register, thread or warp: its step in the tile) are chosen so that loads give fragments, and only the
probabilities move between threads, transposed by one instruction a register.

    keys    rows are tokens; a thread's words of a row are contiguous, so one load gives a row's whole fragment
    values  rows are words (channels), reduced are tokens; a thread loads one word of two neighbouring tokens, and one byte
            permutation a word pairs the values of both
"""

from __future__ import annotations

from typing import Any

from kvcompile.lowering.host.gluon_api import gl, gluon

THREADS = 32


@gluon.constexpr_function
def powers(count: int) -> list[int]:
    """Return the powers of two below ``count``, a power of two."""
    return [1 << bit for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def linear(registers: Any, threads: Any, warps: Any, shape: Any) -> Any:
    """Return the linear layout of ``shape`` with these register and thread bases; dim 0 is distributed over the warps."""
    rest = [0] * (len(shape) - 1)
    return gl.DistributedLinearLayout(registers, threads, [[step, *rest] for step in powers(warps)], [], shape)


@gluon.constexpr_function
def products(warps: Any) -> Any:
    """Return the layout of products' results [WARPS, rows, 8]: a thread has columns 2t and 2t + 1 of rows g and g + 8."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def operand(warps: Any, index: Any, width: Any) -> Any:
    """Return the layout of a product's operand, the first (``index`` 0) or second (1).

    Each thread holds ``width`` consecutive elements along the reduced dim.
    """
    return gl.DotOperandLayout(index, products(warps), width)


@gluon.constexpr_function
def of_rows(warps: Any) -> Any:
    """Return the layout of a vector with one number for each row of results."""
    return gl.SliceLayout(2, products(warps))


@gluon.constexpr_function
def of_columns(warps: Any) -> Any:
    """Return the layout of a vector with one number for each column of results."""
    return gl.SliceLayout(1, products(warps))


@gluon.constexpr_function
def by_thread(warps: Any) -> Any:
    """Return the layout of eight rows of results, [WARPS, 8, 8]: the four threads 4g .. 4g + 3 hold row g, two columns each."""
    return linear([[0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, 8, 8])


@gluon.constexpr_function
def several(warps: Any, word: Any) -> Any:
    """Return the layout [WARPS, 8, 8, word]: that of ``by_thread``, with ``word`` consecutive results in place of each element."""
    registers = [*([0, 0, 0, step] for step in powers(word)), [0, 0, 1, 0]]
    return linear(registers, [[0, 0, 2, 0], [0, 0, 4, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], warps, [warps, 8, 8, word])


@gluon.constexpr_function
def by_half(warps: Any) -> Any:
    """Return the layout of eight rows of results, [WARPS, 8, 2, 2, 2]: that of ``products``, with the 8 columns as three dims of size 2."""
    threads = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return linear([[0, 0, 0, 0, 1]], threads, warps, [warps, 8, 2, 2, 2])


@gluon.constexpr_function
def columns_apart(warps: Any, rows: Any) -> Any:
    """Return the layout of results [WARPS, rows, 2, 2, 2]: that of ``products``, with the 8 columns as three dims of size 2."""
    registers = [[0, 0, 0, 0, 1], [0, 8, 0, 0, 0], *([0, 16 * step, 0, 0, 0] for step in powers(rows // 16))]
    threads = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return linear(registers, threads, warps, [warps, rows, 2, 2, 2])


@gluon.constexpr_function
def key_words(warps: Any, tokens: Any, halves: Any, chunk: Any) -> Any:
    """Return the layout of 16-bit key words [WARPS, tokens, halves], in chunks of ``chunk`` bytes: a quarter of a chunk a thread."""
    run, half = chunk // 8, chunk // 2
    registers = [
        *([0, 0, step] for step in powers(run)), [0, 8, 0], *([0, 0, half * step] for step in powers(halves // half)),
        *([0, 16 * step, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, tokens, halves])


@gluon.constexpr_function
def value_words(warps: Any, tokens: Any, words: Any) -> Any:
    """Return the layout of value words [WARPS, tokens, words], 16 or 32 bits; a thread has two neighbouring tokens of one word."""
    registers = [
        [0, 1, 0], [0, 8, 0], *([0, 0, 8 * step] for step in powers(words // 8)), *([0, 16 * step, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], warps, [warps, tokens, words])


@gluon.constexpr_function
def key_scales(warps: Any, tokens: Any, groups: Any) -> Any:
    """Return the layout of key scales [WARPS, tokens, 1, groups]: in the threads that hold their tokens' rows of results."""
    registers = [
        *([0, 0, 0, step] for step in powers(groups)), [0, 8, 0, 0], *([0, 16 * step, 0, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0] * 4, [0] * 4, [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], warps, [warps, tokens, 1, groups])


@gluon.constexpr_function
def value_scales(warps: Any, tokens: Any, halves: Any, sets: Any) -> Any:
    """Return the layout of value scales [WARPS, tokens, halves, sets]; ``halves`` and ``sets``: as in ``plan.ValuePlan``.

    With two halves, the threads of columns 4 to 7 hold the scales of rows 8 to 15.
    """
    registers = [
        *([0, 0, 0, step] for step in powers(sets)), [0, 8, 0, 0], *([0, 16 * step, 0, 0] for step in powers(tokens // 16)),
    ]
    threads = [[0] * 4, [0, 0, halves - 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return linear(registers, threads, warps, [warps, tokens, halves, sets])


@gluon.constexpr_function
def eight_rows(warps: Any, columns: Any) -> Any:
    """Return the layout of eight rows of a product's first operand, [WARPS, 8, columns].

    Each thread holds ``columns`` / 4 neighbours of a row.
    """
    run = columns // 4
    registers = [[0, 0, step] for step in powers(run)]
    return linear(registers, [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, 8, columns])


@gluon.constexpr_function
def row_copies(warps: Any, elements: Any, size: Any) -> Any:
    """Return the layout for copying rows [WARPS, tokens, elements] of ``size`` bytes an element, 16 bytes a thread."""
    width = 16 // size
    threads = min(THREADS, elements // width)
    return gl.BlockedLayout([1, 1, width], [1, THREADS // threads, threads], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def flat_copies(warps: Any, halves: Any) -> Any:
    """Return the layout for copying runs [WARPS, halves] of 16-bit numbers, 16 bytes a thread if that keeps all threads busy."""
    return gl.BlockedLayout([1, min(8, max(2, halves // THREADS))], [1, THREADS], [warps, 1], [1, 0])


@gluon.constexpr_function
def unswizzled(rank: Any) -> Any:
    """Return the layout of shared memory in the order of the dims."""
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank)][::-1])
