"""All scales or zero points of a token as one word of two or four float16 numbers, unpacked in registers."""

from __future__ import annotations

from kvcompile.lowering.codegen.shared_tables import assembly


def widened(words: str, count: int) -> str:
    """Return a Triton expression for the ``count`` float16 numbers of every word as float32 blocks."""
    halves = " ".join(f"mov.b32 {{h{2 * i}, h{2 * i + 1}}}, w{i};" for i in range(count // 2))
    numbers = " ".join(f"cvt.f32.f16 ${i}, h{i};" for i in range(count))
    body = f"{_cut(count, f'${count}', 'w')} .reg .b16 h<{count}>; {halves} {numbers}"
    return assembly(body, ["=f"] * count, [_register(count)], [words], ["tl.float32"] * count, 1)


def beside(words: str, count: int) -> str:
    """Return a Triton expression for ``count`` float16 blocks, one for each number of the words; two tokens share a register."""
    cut = f"{_cut(count, f'${count}', 'a')} {_cut(count, f'${count + 1}', 'b')}"
    numbers = " ".join(f"prmt.b32 ${i}, a{i // 2}, b{i // 2}, 0x{'7632' if i % 2 else '5410'};" for i in range(count))
    return assembly(f"{cut} {numbers}", ["=r"] * count, [_register(count)] * 2, [words], ["tl.float16"] * count, 2)


def statistics(scales: str, zeros: str | None, count: int, words: str) -> str:
    """Return a Triton expression for a float16 block [tokens, columns]: ``count`` scales, ``count`` zero points, repeated.

    Without ``zeros``, only scales. The operands are words, broadcast over the columns. ``words``, key bytes of the same shape, are not
    read: they make Triton compute the block in the layout of the tensor cores, where a thread has columns 4 t .. 4 t + 3 and
    16 + 4 t .. of a token, t its number modulo 4. Without a loaded operand, the block would be converted through shared memory.
    """
    names = [scales] if zeros is None else [scales, zeros]
    cut = " ".join(_cut(count, f"${2 + 4 * at}", "az"[at]) for at in range(len(names)))
    if count == 2:
        body = f"mov.b32 $0, a0; mov.b32 $1, {'a0' if zeros is None else 'z0'};"
    elif zeros is None:
        body = "mov.b32 $0, a0; mov.b32 $1, a1;"
    else:
        odd = ".reg .b32 t; .reg .pred p; mov.u32 t, %laneid; and.b32 t, t, 1; setp.ne.u32 p, t, 0;"
        body = f"{odd} selp.b32 $0, z0, a0, p; selp.b32 $1, z1, a1, p;"
    return assembly(f"{cut} {body}", ["=r"] * 2, [*[_register(count)] * (4 * len(names)), "r"], [*names, words], ["tl.float16"], 4)


def by_row(numbers: str, count: int, words: str) -> str:
    """Return a Triton expression for a float16 block [rows, tokens] in which row r holds number r % ``count`` of each token's word.

    ``numbers``: the words, broadcast over the rows. ``words``, value byte pairs of the same shape, set the layout as in ``statistics``:
    thread t of a warp holds rows t // 4 and 8 + t // 4.
    """
    lines = [_cut(count, "$1", "a"), _cut(count, "$2", "b"), ".reg .b32 t, u; .reg .pred p, q; mov.u32 t, %laneid;"]
    if count == 4:
        lines.append("and.b32 u, t, 8; setp.ne.u32 p, u, 0; selp.b32 a0, a1, a0, p; selp.b32 b0, b1, b0, p;")
    lines.append("and.b32 u, t, 4; setp.ne.u32 q, u, 0; selp.b32 u, 0x7632, 0x5410, q; prmt.b32 $0, a0, b0, u;")
    return assembly(" ".join(lines), ["=r"], [*[_register(count)] * 2, "r"], [numbers, words], ["tl.float16"], 2)


def _register(count: int) -> str:
    """Return the constraint of a register that holds ``count`` float16 numbers."""
    return {2: "r", 4: "l"}[count]


def _cut(count: int, source: str, name: str) -> str:
    """Return PTX that splits a register of ``count`` float16 numbers into 32-bit registers ``name``0 and, for four, ``name``1."""
    if count == 2:
        return f".reg .b32 {name}<1>; mov.b32 {name}0, {source};"
    return f".reg .b32 {name}<2>; mov.b64 {{{name}0, {name}1}}, {source};"
