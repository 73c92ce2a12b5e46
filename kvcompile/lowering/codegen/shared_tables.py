"""Tables in a program's shared memory, by PTX: blocks that are stored there by index ahead of the loop, and what reads them back.

Who reads has no operand for where a table is, but its name: with one, a scalar, Triton does not move lookups behind their change to the
tensor cores' layout, and all that was looked up goes through shared memory.

``tests/lowering/test_table_tricks.py`` runs the PTX of tables in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

LANES = 32
"""Threads of a warp."""

PLANES = 2
"""Bytes of a level: the upper one and the lower."""


def assembly(body: str, outputs: Sequence[str], inputs: Sequence[str], operands: Sequence[str], dtypes: Sequence[str], pack: int) -> str:
    """A call of ``tl.inline_asm_elementwise`` on ``pack`` elements at a time; ``outputs``, ``inputs``: constraints, one a register."""
    constraints = ",".join([*outputs, *inputs])
    dtype = dtypes[0] if len(dtypes) == 1 else f"({', '.join(dtypes)})"
    return (
        f"tl.inline_asm_elementwise('{{ {body} }}', '{constraints}', [{', '.join(operands)}], dtype={dtype}, is_pure=True, pack={pack})"
    )


def statement(body: str, inputs: str = "r", operands: Sequence[str] = ("0",)) -> str:
    """Assembly that is run for what it does; Triton repeats it for every element that a thread has of the operands."""
    return (
        f"tl.inline_asm_elementwise('{body} mov.b32 $0, 0;', '=r,{inputs}', [{', '.join(operands)}], dtype=tl.int32, is_pure=False, pack=1)"
    )


def declared(name: str, size: int) -> str:
    """Shared memory ``name`` of the kernel, of ``size`` bytes; a statement of its own, since a name is declared once."""
    return statement(f".shared .align 16 .b8 {name}[{size}];")


def filled() -> str:
    """All threads of a program wait until what they store is there."""
    return statement("bar.sync 0;")


def kept(name: str, at: int, index: str, value: str, itemsize: int) -> str:
    """Stores a block of numbers of 1, 2 or 4 bytes, given as int32, behind byte ``at`` of shared memory ``name``, by index."""
    body = f"{{ .reg .b32 n; mov.u32 n, {name}; add.u32 n, n, $1; st.shared.b{8 * itemsize} [n+{at}], $2; }}"
    return statement(body, "r,r", [_bytes(index, itemsize), value])


def taken(name: str, at: int, index: str, dtype: str, itemsize: int) -> str:
    """The block that was ``kept``, by index, of numbers of 1 or 2 bytes."""
    kind = "s8" if itemsize == 1 else "u16"
    body = f".reg .b32 n; mov.u32 n, {name}; add.u32 n, n, $1; ld.shared.{kind} $0, [n+{at}];"
    loaded = assembly(body, ["=r"], ["r"], [_bytes(index, itemsize)], ["tl.int32"], 1)
    return f"{loaded}.to({dtype})" if itemsize == 1 else f"{loaded}.to(tl.int16).to({dtype}, bitcast=True)"


def _bytes(index: str, itemsize: int) -> str:
    return index if itemsize == 1 else f"({index}) * {itemsize}"


def plane_bytes(bits: int) -> int:
    """Bytes of a table of 2^bits levels in two planes, the upper bytes first."""
    return PLANES << bits


def store_planes(bits: int, name: str, at: int, index: str, level: str, lower: int) -> str:
    """Stores a block of levels by index as a table of planes behind byte ``at``; integers whose lower byte has ``lower`` bits."""
    body = (
        f"{{ .reg .b32 n, u; mov.u32 n, {name}; add.u32 n, n, $1; shr.u32 u, $2, {lower}; st.shared.b8 [n+{at}], u; "
        f"and.b32 u, $2, {(1 << lower) - 1}; st.shared.b8 [n+{at + (1 << bits)}], u; }}"
    )
    return statement(body, "r,r", [index, level])


def plane_registers(bits: int, name: str, at: int) -> str:
    """PTX that loads both planes of a table into registers p0, p1, ..; all threads ask for the same."""
    count = plane_bytes(bits) // 4
    vector = min(4, count)
    loads = " ".join(
        f"ld.shared.v{vector}.b32 {{{', '.join(f'p{first + i}' for i in range(vector))}}}, [n+{at + 4 * first}];"
        for first in range(0, count, vector)
    )
    return f".reg .b32 n, p<{count}>; mov.u32 n, {name}; {loads}"


def eight_levels(bits: int, plane: int, block: int) -> str:
    """The two registers of eight levels of a plane, the operands of ``prmt``; twice the one that four levels are."""
    each = (1 << bits) // 4
    first = plane * each + 2 * block
    return f"p{first}, p{first + 1 if each > 1 else first}"


def moved(to: str, source: str, right: int) -> str:
    """PTX that moves a register's bits to the right, or to the left where ``right`` is negative."""
    if not right:
        return f"mov.b32 {to}, {source}; "
    return f"{'shr' if right > 0 else 'shl'}.b32 {to}, {source}, {abs(right)}; "
