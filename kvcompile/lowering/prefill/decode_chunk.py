"""Source of the kernel that decodes one chunk of tokens into a scratch buffer, keys and values in one launch.

A program has ``TOKENS`` tokens of one kv head of one batch row, of keys if its third number is 0, otherwise of values. Codes unpack as in
the prefill template (``TileSlot``), or index a table (``TableSlot``); value = code * scale (+ zero point) is one fused multiply-add
in float32, rounded once to the queries' dtype, as in a dense cache. Tokens that no query attends to are not decoded, and
readers mask their stale content.

    scratch [1, B, K, CHUNK, D] of keys, and of values with Dv: one page in channel order, token FIRST + t at row t
"""

from __future__ import annotations

import dataclasses

import torch

from kvcompile.lowering.codegen.expressions import TRITON_TYPES
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.slot import PAIR, TileSlot
from kvcompile.lowering.prefill.table_slot import TableSlot

KERNEL = "kvcompile_decode"

TOKENS = 64
"""Tokens of one program."""

WARPS = 4


@dataclasses.dataclass(frozen=True)
class DecodeTo:
    """Where decoded tokens of one slot go: ``pointers`` is an expression [TOKENS, 1] of their first channels, in ``dtype``.

    ``page_rows``: tokens of a page of the planes.
    """

    pointers: str
    dtype: torch.dtype
    page_rows: int


def planes_of(letter: str, slot: TileSlot | TableSlot) -> tuple[str, ...]:
    """Return the names of the planes that a slot is decoded from."""
    more = [f"{letter}_ZEROS"] if slot.zeros else []
    return (f"{letter}_WORDS", f"{letter}_SCALES", *more, *([f"{letter}_TABLE"] if isinstance(slot, TableSlot) else []))


def arguments_of(config: PrefillConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the kernel's pointers and of its integers, in order.

    Pointers: planes; NEWEST and OLDEST (int64, range of visible positions by batch row), BASE; the two scratches. Integers: each plane's
    strides of pages, batch rows, heads and rows; those of NEWEST, OLDEST and BASE (0 if all rows share one); CAPACITY, FIRST.
    """
    planes = [plane for letter, slot in zip("KV", config.decoded, strict=True) for plane in planes_of(letter, slot)]
    limits = ["NEWEST", *(["OLDEST"] if config.masks.lo else []), *(["BASE"] if config.exact_newest else [])]
    strides = [f"{plane}_{axis}" for plane in planes for axis in "nbhr"]
    return (*planes, *limits, "K_OUT", "V_OUT"), (*strides, *(f"{limit}_b" for limit in limits), "CAPACITY", "FIRST")


def decode_source(config: PrefillConfig) -> str:
    """Return the module of one kernel for both slots of ``config``; its ``chunk`` is the number of tokens in the scratch."""
    pointers, integers = arguments_of(config)
    newest = ["newest = tl.minimum(tl.load(NEWEST + b * NEWEST_b), CAPACITY - 1)"]
    newest += ["newest = tl.minimum(newest, tl.load(BASE + b * BASE_b) - 1)"] if config.exact_newest else []
    unseen = "t0 > newest" + (f") | (t0 + {TOKENS} <= tl.load(OLDEST + b * OLDEST_b)" if config.masks.lo else "")
    body = [
        f"b = (tl.program_id(1) // {config.kv_heads}).to(tl.int64)", f"h = (tl.program_id(1) % {config.kv_heads}).to(tl.int64)",
        f"row = tl.program_id(0) * {TOKENS}", "t0 = FIRST + row", *newest, f"if ({unseen}):", "    return",
        f"i = tl.arange(0, {TOKENS})", f"page = ((t0 + i) // {config.page_rows}).to(tl.int64)", f"at = (t0 + i) % {config.page_rows}",
    ]
    for number, (letter, slot) in enumerate(zip("KV", config.decoded, strict=True)):
        rows = f"((b * {config.kv_heads} + h) * {config.chunk} + row) * {slot.dim} + i[:, None] * {slot.dim}"
        to = DecodeTo(f"{letter}_OUT + {rows}", config.dtype, config.page_rows)
        body += [f"if tl.program_id(2) == {number}:", *(f"    {line}" for line in decode_statements(letter, slot, to))]
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    return "\n".join([*head, f"def {KERNEL}({', '.join((*pointers, *integers))}):", *(f"    {line}" for line in body)]) + "\n"


def decode_statements(letter: str, slot: TileSlot | TableSlot, to: DecodeTo) -> list[str]:
    """Return statements that decode TOKENS tokens of one slot and store them.

    They read ``b``, ``h``, ``t0``, the first token's position, ``i``, ``page`` and ``at``, blocks [TOKENS], of the program.
    """
    if isinstance(slot, TableSlot):
        return _indices(letter, slot, to)
    name, words = letter.lower(), f"{letter}_WORDS"
    row = PAIR * slot.words
    groups = max(1, slot.scales * row // slot.dim)
    blocks = TOKENS // slot.block
    lines = [
        f"{name}_base = {words}.to(tl.pointer_type(tl.uint16)) + (b * {words}_b + h * {words}_h) // {PAIR}",
        f"{name}_row = page * ({words}_n // {PAIR}) + at * ({words}_r // {PAIR})",
        f"{name}_words = tl.load({name}_base + {name}_row[:, None] + tl.arange(0, {slot.words})[None, :])",
    ]
    if slot.block > 1:
        lines += [
            f"{name}_i = tl.arange(0, {blocks}) * {slot.block}", f"{name}_page = ((t0 + {name}_i) // {to.page_rows}).to(tl.int64)",
            f"{name}_at = (t0 + {name}_i) % {to.page_rows} // {slot.block}",
        ]
    else:
        lines += [f"{name}_page = page", f"{name}_at = at"]
    lines.append(f"{name}_out = {to.pointers}")
    for part in range(slot.dim // row):
        lines += _part(letter, slot, part, groups, blocks, TRITON_TYPES[to.dtype])
    return lines


def _load(letter: str, plane: str, groups: int, first: int) -> str:
    """Return an expression that loads ``groups`` scales or zero points of every block of tokens, in float32."""
    name = letter.lower()
    place = f"b * {plane}_b + h * {plane}_h + ({name}_page * {plane}_n + {name}_at * {plane}_r)[:, None]"
    return f"tl.load({plane} + {place} + tl.arange(0, {groups})[None, :] + {first}).to(tl.float32)"


def _indices(letter: str, slot: TableSlot, to: DecodeTo) -> list[str]:
    """Return statements that decode the tokens of a slot of table indices and store them."""
    name, row = letter.lower(), slot.row
    groups = max(1, row // slot.fmt.group)
    cut = f"({TOKENS}, 1, {groups}, {row // groups})"
    lines = [f"{name}_page = page", f"{name}_at = at", *slot.words(name, f"{letter}_WORDS"), f"{name}_out = {to.pointers}"]
    for part in range(slot.fmt.parts):
        first = part * row // slot.fmt.group
        lines += [
            f"value = {slot.levels(name, f'{letter}_TABLE', part, cut, groups)}",
            f"value = value * {_load(letter, f'{letter}_SCALES', groups, first)}[:, None, :, None]",
        ]
        if slot.zeros:
            lines.append(f"value = value + {_load(letter, f'{letter}_ZEROS', groups, first)}[:, None, :, None]")
        there = f"{name}_out + ({part * row} + tl.arange(0, {row}))[None, :]"
        lines.append(f"tl.store({there}, value.reshape({TOKENS}, {row}).to({TRITON_TYPES[to.dtype]}))")
    return lines


def _part(letter: str, slot: TileSlot, part: int, groups: int, blocks: int, dtype: str) -> list[str]:
    """Return statements for the channels in one part of every word: ``groups`` runs, each with one scale a block of tokens."""
    name, row = letter.lower(), PAIR * slot.words
    even, odd = (element for element in slot.elements if element.part == part)
    cut = f"({blocks}, {slot.block}, {groups}, {row // groups})"
    first = part * row * slot.scales // slot.dim

    assert even.power == odd.power
    assert even.offset == odd.offset
    lines = [
        f"raw = tl.join({even.unpack(name + '_words')}, {odd.unpack(name + '_words')})",
        f"scale = {_load(letter, f'{letter}_SCALES', groups, first)}",
        f"value = raw.reshape{cut}.to(tl.float32) * (scale * {2.0**even.power!r})[:, None, :, None]",
    ]
    terms = [_load(letter, f"{letter}_ZEROS", groups, first)] if slot.zeros else []
    terms += [f"scale * {-float(even.offset)!r}"] if even.offset else []
    if terms:
        lines.append(f"value += ({' + '.join(terms)})[:, None, :, None]")
    to = f"{name}_out + ({part * row} + tl.arange(0, {row}))[None, :]"
    return [*lines, f"tl.store({to}, value.reshape({TOKENS}, {row}).to({dtype}))"]
