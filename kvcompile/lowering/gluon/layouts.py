"""Layouts of the kernel's tiles: which thread holds which element.

A program has WARPS warps, and each has tokens of its own, so every tile has the warps as its first dim. A product m16n8k16 wants its
operands in FRAGMENTS: thread 4 * g + t of a warp holds rows g and g + 8, and pairs of neighbors along the reduced dim at 2t and
2t + 8. What is written here as bases (a power of two of a register, a thread or a warp, and how far it moves in the tile) is chosen such
that loads give fragments, and nothing moves between threads but the probabilities, which one instruction a register turns.

    keys    rows are tokens; a thread's words of a row lie side by side, so one load gives it all of a row's fragment
    values  rows are words (channels), reduced are tokens; a thread loads the same word of two neighboring tokens, and one byte
            permutation a word puts the halves of both together
"""

from __future__ import annotations

from typing import Any

from kvcompile.lowering.host.gluon_api import gl, gluon

THREADS = 32


@gluon.constexpr_function
def powers(count: int) -> list[int]:
    """The powers of two below a power of two."""
    return [1 << bit for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def linear(registers: Any, threads: Any, warps: Any, shape: Any) -> Any:
    """A layout by its bases; ``warps`` warps are the first dim."""
    rest = [0] * (len(shape) - 1)
    return gl.DistributedLinearLayout(registers, threads, [[step, *rest] for step in powers(warps)], [], shape)


@gluon.constexpr_function
def products(warps: Any) -> Any:
    """Results [WARPS, rows, 8] of products: columns 2t and 2t + 1 of rows g and g + 8."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def operand(warps: Any, index: Any, width: Any) -> Any:
    """The first or second operand of a product; a thread has ``width`` neighbors along the reduced dim."""
    return gl.DotOperandLayout(index, products(warps), width)


@gluon.constexpr_function
def of_rows(warps: Any) -> Any:
    """One number for each row of results."""
    return gl.SliceLayout(2, products(warps))


@gluon.constexpr_function
def of_columns(warps: Any) -> Any:
    """One number for each column of results."""
    return gl.SliceLayout(1, products(warps))


@gluon.constexpr_function
def by_thread(warps: Any) -> Any:
    """Results of one fragment's rows, [WARPS, 8, 8]: one row a group of four threads."""
    return linear([[0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, 8, 8])


@gluon.constexpr_function
def several(warps: Any, word: Any) -> Any:
    """``word`` results of each place of ``by_thread`` side by side, [WARPS, 8, 8, word]."""
    registers = [*([0, 0, 0, step] for step in powers(word)), [0, 0, 1, 0]]
    return linear(registers, [[0, 0, 2, 0], [0, 0, 4, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], warps, [warps, 8, 8, word])


@gluon.constexpr_function
def by_half(warps: Any) -> Any:
    """Results of one fragment's rows with the columns taken apart, [WARPS, 8, 2, 2, 2]."""
    threads = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return linear([[0, 0, 0, 0, 1]], threads, warps, [warps, 8, 2, 2, 2])


@gluon.constexpr_function
def columns_apart(warps: Any, rows: Any) -> Any:
    """Results [WARPS, rows, 8] with the columns taken apart, [WARPS, rows, 2, 2, 2]."""
    registers = [[0, 0, 0, 0, 1], [0, 8, 0, 0, 0], *([0, 16 * step, 0, 0, 0] for step in powers(rows // 16))]
    threads = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return linear(registers, threads, warps, [warps, rows, 2, 2, 2])


@gluon.constexpr_function
def key_words(warps: Any, tokens: Any, halves: Any, chunk: Any) -> Any:
    """Words of 16 bits [WARPS, tokens, halves], in chunks of ``chunk`` bytes: a quarter of a chunk a thread."""
    run, half = chunk // 8, chunk // 2
    registers = [
        *([0, 0, step] for step in powers(run)), [0, 8, 0], *([0, 0, half * step] for step in powers(halves // half)),
        *([0, 16 * step, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, tokens, halves])


@gluon.constexpr_function
def value_words(warps: Any, tokens: Any, words: Any) -> Any:
    """Words [WARPS, tokens, words] of 16 or 32 bits: two neighboring tokens side by side, one of eight words a group of four threads."""
    registers = [
        [0, 1, 0], [0, 8, 0], *([0, 0, 8 * step] for step in powers(words // 8)), *([0, 16 * step, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], warps, [warps, tokens, words])


@gluon.constexpr_function
def key_scales(warps: Any, tokens: Any, groups: Any) -> Any:
    """Scales of tokens [WARPS, tokens, 1, groups] where their rows of results are."""
    registers = [
        *([0, 0, 0, step] for step in powers(groups)), [0, 8, 0, 0], *([0, 16 * step, 0, 0] for step in powers(tokens // 16)),
    ]
    return linear(registers, [[0] * 4, [0] * 4, [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], warps, [warps, tokens, 1, groups])


@gluon.constexpr_function
def value_scales(warps: Any, tokens: Any, halves: Any, sets: Any) -> Any:
    """Scales of tokens [WARPS, tokens, halves, sets], where ``halves`` is 2 those of the upper half where columns 4 to 7 are."""
    registers = [
        *([0, 0, 0, step] for step in powers(sets)), [0, 8, 0, 0], *([0, 16 * step, 0, 0] for step in powers(tokens // 16)),
    ]
    threads = [[0] * 4, [0, 0, halves - 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return linear(registers, threads, warps, [warps, tokens, halves, sets])


@gluon.constexpr_function
def eight_rows(warps: Any, columns: Any) -> Any:
    """Half of the rows of a first operand in natural order, [WARPS, 8, columns]."""
    run = columns // 4
    registers = [[0, 0, step] for step in powers(run)]
    return linear(registers, [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warps, [warps, 8, columns])


@gluon.constexpr_function
def row_copies(warps: Any, elements: Any, size: Any) -> Any:
    """Copies of rows [WARPS, tokens, elements] by 16 bytes a thread."""
    width = 16 // size
    threads = min(THREADS, elements // width)
    return gl.BlockedLayout([1, 1, width], [1, THREADS // threads, threads], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def flat_copies(warps: Any, halves: Any) -> Any:
    """Copies of runs [WARPS, halves] of 16-bit numbers, 16 bytes a thread where that keeps all threads busy."""
    return gl.BlockedLayout([1, min(8, max(2, halves // THREADS))], [1, THREADS], [warps, 1], [1, 0])


@gluon.constexpr_function
def unswizzled(rank: Any) -> Any:
    """Shared memory in the order of the dims."""
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank)][::-1])
