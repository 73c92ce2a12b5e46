"""Value levels for two tokens at a time: one load from a table of all pairs of levels, or bytes selected in registers.

A register holds the same pair of bytes of two tokens. One multiplication puts a code of each token side by side, and their levels are one
load from a table of pairs, which gives the register that the tensor cores take. Random pairs of 4-bit codes conflict in a bank three times
a warp, so loads are the bottleneck; some scales' codes are looked up in registers instead, three instructions a code, as many as keep the
integer units equally busy.
"""

from __future__ import annotations

import dataclasses

from kvcompile.lowering.codegen.shared_tables import LANES, assembly, eight_levels, moved, plane_registers, statement

HALF = 16
"""Bits of each of the two words in a register."""

BY_HALF = "mul.f32 {to}, {to}, 0f3F000000;"
"""PTX that halves a level: a level may be up to twice the largest float16."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A code of ``bits`` bits, ``place`` bits above bit 0 of a 16-bit word; a register holds two such words."""

    bits: int
    place: int

    @property
    def mask(self) -> int:
        """Mask of the field in both words of a register."""
        return (((1 << self.bits) - 1) << self.place) * 0x10001

    @property
    def index(self) -> int:
        """Lowest bit of the index into the table of pairs, within the product: the first token's code, then the second token's above it."""
        return max(HALF, HALF + self.place - self.bits)

    @property
    def factor(self) -> int:
        """Factor that moves both codes of the masked register to the index; other bits of the product end up below it or above bit 31."""
        return (1 << (self.index - self.place)) + (1 << (self.index + self.bits - HALF - self.place))


def pair_bytes(bits: int) -> int:
    """Return the bytes of a table of all pairs of 2^bits levels."""
    return 4 << (2 * bits)


def fill_pairs(bits: int, name: str, levels: str, stride: str) -> str:
    """Return a statement that fills shared memory ``name`` with all pairs of halved float16 levels; an index's low bits are the first code.

    ``levels`` points to 2^bits float32, ``stride`` apart. It is a scalar to Triton, so each lane of each warp runs the statement; all
    warps of a program write equal values.
    """
    count = 1 << bits
    load = f"ld.global.nc.f32 f, [{{at}}]; {BY_HALF.format(to='f')} cvt.rn.f16.f32 {{to}}, f;"
    fill = " ".join(
        f"{load.format(at='b', to='g')} mov.b32 m, {{h, g}}; st.shared.b32 [n+{4 * LANES * step}], m; add.u64 b, b, c;"
        for step in range(max(1, count * count // LANES))
    )
    body = (
        "{ .reg .b32 n, m, s; .reg .b64 a, b, c; .reg .f32 f; .reg .b16 h, g; "
        f"mov.b32 s, {stride}; mov.u32 n, %laneid; and.b32 n, n, {min(LANES, count * count) - 1}; and.b32 m, n, {count - 1}; "
        f"mul.lo.u32 m, m, s; mul.wide.u32 a, m, 4; add.u64 a, a, $1; {load.format(at='a', to='h')} "
        f"shr.u32 m, n, {bits}; mul.lo.u32 m, m, s; mul.wide.u32 b, m, 4; add.u64 b, b, $1; "
        f"mul.wide.u32 c, s, {4 * max(1, LANES >> bits)}; mov.u32 m, {name}; shl.b32 n, n, 2; add.u32 n, n, m; {fill} }}"
    )
    return statement(body, "l", [f"{levels}.to(tl.int64)"])


def looked_up(bits: int, part: int, byte: int, words: list[str], name: str) -> str:
    """Return a Triton expression for the float16 block of halved levels, of part ``part`` of byte ``byte`` of two tokens' words.

    ``words``: uint16, pairs of bytes, one block for each byte of a word. ``name``: the shared memory with the table of pairs.
    """
    segment, place = divmod(bits * part, 8)
    if place + bits <= 8:
        used, field = words[segment : segment + 1], Field(bits, 8 * byte + place)
        found = f"and.b32 u, $1, 0x{field.mask:08x};"
    else:
        used, field = words[segment : segment + 2], Field(bits, 0)
        lower = ((1 << (8 - place)) - 1) * 0x10001
        found = moved("u", "$1", 8 * byte + place) + moved("v", "$2", 8 * byte + place - 8)
        found += f"lop3.b32 u, u, v, 0x{lower:08x}, 0xe4; and.b32 u, u, 0x{field.mask:08x};"
    body = (
        f".reg .b32 n, u, v; {found} mul.lo.u32 u, u, 0x{field.factor:08x}; shr.u32 u, u, {field.index - 2}; mov.u32 n, {name}; "
        "add.u32 u, u, n; ld.shared.b32 $0, [u];"
    )
    return assembly(body, ["=r"], ["r"] * len(used), used, ["tl.float16"], 2)


def picked_pairs(part: int, word: str, name: str, at: int) -> str:
    """Return a Triton expression for two float16 blocks, one for each byte: levels of part ``part`` of uint16 words of 4-bit codes.

    The table of float16 levels is in shared memory ``name``, in two planes from byte ``at`` on.
    """
    bits = 4
    lines = [plane_registers(bits, name, at), ".reg .b32 s, t, m, a, b, c;", moved("s", "$4", 4 * part), moved("t", "$5", 4 * part - 4)]
    # In each byte: a code of the first two tokens in the lower four bits, of the other two in the upper; bytes 0 together, then bytes 1.
    lines.append("lop3.b32 s, s, t, 0x0f0f0f0f, 0xe4; prmt.b32 s, s, 0, 0x3120;")
    # Bit 3 of a code selects one of two blocks of eight levels, by another ``prmt``.
    lines.append("shr.u32 m, s, 1; lop3.b32 m, m, 0x44444444, 0x32103210, 0xea; and.b32 s, s, 0x77777777;")
    for byte in range(2):
        if byte:
            lines.append("shr.u32 s, s, 16; shr.u32 m, m, 16;")
        for plane, to in ((1, "a"), (0, "c")):
            one, other = (eight_levels(bits, plane, block) for block in range(2))
            lines.append(f"prmt.b32 {to}, {one}, s; prmt.b32 b, {other}, s; prmt.b32 {to}, {to}, b, m;")
        lines.append(f"prmt.b32 ${2 * byte}, a, c, 0x6240; prmt.b32 ${2 * byte + 1}, a, c, 0x7351;")
    return assembly(" ".join(lines), ["=&r"] * 4, ["r"] * 2, [word], ["tl.float16"] * 2, 4)
