"""Tables in a program's shared memory, by PTX: filled by index before the loop, and looked up in it.

A lookup refers to its table by name, without an operand for the address: with a scalar operand, Triton does not move lookups behind
the conversion to the tensor cores' layout, and every result passes through shared memory once more.

``tests/lowering/test_table_tricks.py`` runs the PTX of tables in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

LANES = 32
"""Threads of a warp."""

PLANES = 2
"""Bytes of a level, each in a plane of its own: high and low."""


def assembly(body: str, outputs: Sequence[str], inputs: Sequence[str], operands: Sequence[str], dtypes: Sequence[str], pack: int) -> str:
    """Return a call of ``tl.inline_asm_elementwise`` on ``pack`` elements; ``outputs``, ``inputs``: one constraint for each register."""
    constraints = ",".join([*outputs, *inputs])
    dtype = dtypes[0] if len(dtypes) == 1 else f"({', '.join(dtypes)})"
    return (
        f"tl.inline_asm_elementwise('{{ {body} }}', '{constraints}', [{', '.join(operands)}], dtype={dtype}, is_pure=True, pack={pack})"
    )


def statement(body: str, inputs: str = "r", operands: Sequence[str] = ("0",)) -> str:
    """Return inline assembly that is run for its side effects; Triton repeats it for each element that a thread has of the operands."""
    return (
        f"tl.inline_asm_elementwise('{body} mov.b32 $0, 0;', '=r,{inputs}', [{', '.join(operands)}], dtype=tl.int32, is_pure=False, pack=1)"
    )


def declared(name: str, size: int) -> str:
    """Return a statement that declares ``size`` bytes of shared memory as ``name``. Separate from stores, since a name is declared once."""
    return statement(f".shared .align 16 .b8 {name}[{size}];")


def filled() -> str:
    """Return a statement, a barrier at which all threads of the program wait until the tables are stored."""
    return statement("bar.sync 0;")


def kept(name: str, at: int, index: str, value: str, itemsize: int) -> str:
    """Return a statement that stores numbers of 1, 2 or 4 bytes, given as int32 ``value``, at entries ``index`` of shared memory ``name``.

    The table begins at byte ``at`` of that memory.
    """
    body = f"{{ .reg .b32 n; mov.u32 n, {name}; add.u32 n, n, $1; st.shared.b{8 * itemsize} [n+{at}], $2; }}"
    return statement(body, "r,r", [_bytes(index, itemsize), value])


def taken(name: str, at: int, index: str, dtype: str, itemsize: int) -> str:
    """Return a Triton expression that loads a block of numbers of 1 or 2 bytes, stored by ``kept``, from entries ``index``."""
    kind = "s8" if itemsize == 1 else "u16"
    body = f".reg .b32 n; mov.u32 n, {name}; add.u32 n, n, $1; ld.shared.{kind} $0, [n+{at}];"
    loaded = assembly(body, ["=r"], ["r"], [_bytes(index, itemsize)], ["tl.int32"], 1)
    return f"{loaded}.to({dtype})" if itemsize == 1 else f"{loaded}.to(tl.int16).to({dtype}, bitcast=True)"


def _bytes(index: str, itemsize: int) -> str:
    return index if itemsize == 1 else f"({index}) * {itemsize}"


def plane_bytes(bits: int) -> int:
    """Return the bytes of both planes of a table of 2^bits levels: one plane holds the levels' high bytes, the other their low bytes."""
    return PLANES << bits


def store_planes(bits: int, name: str, at: int, index: str, level: str, lower: int) -> str:
    """Return a statement that stores the integer ``level`` as entry ``index`` of a table: its high byte and its low, of ``lower`` bits.

    The table begins at byte ``at`` of the shared memory ``name``: 2^bits high bytes, then as many low ones.
    """
    body = (
        f"{{ .reg .b32 n, u; mov.u32 n, {name}; add.u32 n, n, $1; shr.u32 u, $2, {lower}; st.shared.b8 [n+{at}], u; "
        f"and.b32 u, $2, {(1 << lower) - 1}; st.shared.b8 [n+{at + (1 << bits)}], u; }}"
    )
    return statement(body, "r,r", [index, level])


def plane_registers(bits: int, name: str, at: int) -> str:
    """Return PTX that loads both planes of a table into registers p0, p1, ...; all threads load the same addresses."""
    count = plane_bytes(bits) // 4
    vector = min(4, count)
    loads = " ".join(
        f"ld.shared.v{vector}.b32 {{{', '.join(f'p{first + i}' for i in range(vector))}}}, [n+{at + 4 * first}];"
        for first in range(0, count, vector)
    )
    return f".reg .b32 n, p<{count}>; mov.u32 n, {name}; {loads}"


def eight_levels(bits: int, plane: int, block: int) -> str:
    """Return the registers of block ``block`` of eight levels of a plane, as ``prmt``'s operands; one register twice for four levels."""
    each = (1 << bits) // 4
    first = plane * each + 2 * block
    return f"p{first}, p{first + 1 if each > 1 else first}"


def moved(to: str, source: str, right: int) -> str:
    """Return PTX that shifts ``source`` right into ``to``, or left if ``right`` is negative."""
    if not right:
        return f"mov.b32 {to}, {source}; "
    return f"{'shr' if right > 0 else 'shl'}.b32 {to}, {source}, {abs(right)}; "
