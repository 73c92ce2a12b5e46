"""Source of the kernel that decodes the tokens of requests with long prompts into a scratch, keys and values in one launch.

A program has ``TOKENS`` tokens of one kv head of one request, of keys if its third number is 0, otherwise of values. It finds each token's
block in the request's row of the block table; codes are decoded as in ``prefill.decode_chunk``. A block that the pool does not have is
not read; the request is noted in WRONG.

    scratch [places * ROOM, HEADS, D] of keys, and of values with Dv: token t of the request at place p is row p * ROOM + t. HEADS of
    the pool's kv heads from FIRST_HEAD on are decoded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from kvcompile import schemes
from kvcompile.lowering.codegen.expressions import TRITON_TYPES, triton_expression
from kvcompile.lowering.decode.offline import load_module
from kvcompile.lowering.prefill.decode_chunk import TOKENS, DecodeTo, decode_statements, planes_of
from kvcompile.lowering.prefill.slot import TileSlot
from kvcompile.lowering.prefill.table_slot import TableSlot, chunk_slot
from kvcompile.types import KernelFormat, Role, SlotSpec

KERNEL = "kvcompile_decode_rows"
WARPS = 4
TABLES = ("BLOCK_TABLE", "LENGTHS", "FIRSTS", "REQUESTS", "WRONG")
COVERED = 128
"""Tokens of the widest tile of flash attention: it may read as many ahead of the first that a window shows, and hides them."""
NUMBERS = ("TABLE_ROW", "BLOCKS", "ROOM", "FIRST_HEAD", "HEADS")


@dataclasses.dataclass(frozen=True)
class WholeSlot:
    """One slot whose words are channels: dense tokens, or codes of a byte under one scale per kv head (``fmt.static``)."""

    dim: int
    fmt: KernelFormat

    def statements(self, letter: str, to: DecodeTo) -> list[str]:
        """Return statements that decode TOKENS tokens and store them, as ``decode_statements``."""
        name, words = letter.lower(), f"{letter}_WORDS"
        columns = triton.next_power_of_2(self.dim)
        inside = "None" if columns == self.dim else f"(channel < {self.dim})[None, :]"
        place = f"b * {words}_b + h * {words}_h + (page * {words}_n + at * {words}_r)[:, None]"
        lines = [
            f"channel = tl.arange(0, {columns})",
            f"{name}_words = tl.load({words} + {place} + channel[None, :], mask={inside})",
            f"value = {triton_expression(self.fmt, 0, f'{name}_words')}",
        ]
        if self.fmt.static:
            lines.append(f"value = value.to(tl.float32) * tl.load({letter}_STATIC + h * {letter}_STATIC_h)")
        return [*lines, f"tl.store({to.pointers} + channel[None, :], value.to({TRITON_TYPES[to.dtype]}), mask={inside})"]


Decoded = TileSlot | TableSlot | WholeSlot


@functools.lru_cache(maxsize=256)
def decoded_slot(scheme: str, role: Role, dim: int, word: torch.dtype, dtype: torch.dtype, packed: bool) -> Decoded | None:
    """Return the plan for decoding one slot of a pool to ``dtype``, float16 or bfloat16; None if the kernel does not take its sizes.

    ``word``: dtype of the plane of codes; ``packed``: codes may be unpacked by inline PTX.
    """
    fmt = schemes.parse(scheme).for_role(role).format(SlotSpec(1, dim, word, role))
    if fmt.parts == fmt.segments == fmt.block == 1 and not (fmt.scaled or fmt.levels or fmt.norms):
        return WholeSlot(dim, fmt) if fmt.static or word == dtype else None
    return chunk_slot(scheme, role, dim, word, dtype, packed)


def plane_arguments(letter: str, slot: Decoded) -> tuple[str, ...]:
    """Return the names of the planes that a slot is decoded from, in the order in which a pool has them."""
    if isinstance(slot, WholeSlot):
        return (f"{letter}_WORDS", *((f"{letter}_STATIC",) if slot.fmt.static else ()))
    return planes_of(letter, slot)


def arguments_of(slots: Sequence[Decoded]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the kernel's pointers and of its integers, in order; strides are those of planes [N, 1, K, rows, width]."""
    planes = [plane for letter, slot in zip("KV", slots, strict=True) for plane in plane_arguments(letter, slot)]
    return (*planes, *TABLES, "K_OUT", "V_OUT"), (*(f"{plane}_{axis}" for plane in planes for axis in "nbhr"), *NUMBERS)


def decode_source(slots: tuple[Decoded, Decoded], dtype: torch.dtype, page: int) -> str:
    """Return the module of the kernel that decodes keys and values to ``dtype`` from blocks of ``page`` tokens."""
    pointers, integers = arguments_of(slots)
    body = [
        f"tiles = ROOM // {TOKENS}", "place = tl.program_id(0) // tiles", f"t0 = (tl.program_id(0) % tiles) * {TOKENS}",
        "request = tl.load(REQUESTS + place)", "length = tl.load(LENGTHS + place)",
        "first_seen = tl.load(FIRSTS + place, mask=length > 0, other=0)",
        f"if (t0 >= length) | (t0 + {TOKENS} <= first_seen // {COVERED} * {COVERED}):", "    return",
        "b = place.to(tl.int64) * 0", "h = (tl.program_id(1) + FIRST_HEAD).to(tl.int64)", f"i = tl.arange(0, {TOKENS})",
        # A token ahead of the window is hidden, and its block may be another request's by now: the first token in its place.
        "t = tl.maximum(t0 + i, first_seen)", f"block = BLOCK_TABLE + request.to(tl.int64) * TABLE_ROW + t // {page}",
        "given = tl.load(block, mask=t < length, other=0)", "wrong = (given < 0) | (given >= BLOCKS)",
        "if tl.max(wrong.to(tl.int32), 0) != 0:", "    tl.store(WRONG + place, 1)",
        "page = tl.where(wrong, 0, given).to(tl.int64)", f"at = t % {page}",
        "first = (place.to(tl.int64) * ROOM + t0) * HEADS + tl.program_id(1)",
    ]
    for number, (letter, slot) in enumerate(zip("KV", slots, strict=True)):
        to = DecodeTo(f"({letter}_OUT + first * {slot.dim} + (i * HEADS * {slot.dim})[:, None])", dtype, page)
        made = slot.statements(letter, to) if isinstance(slot, WholeSlot) else decode_statements(letter, slot, to)
        body += [f"if tl.program_id(2) == {number}:", *(f"    {line}" for line in made)]
    loose = ("TABLE_ROW", "BLOCKS", "FIRST_HEAD")
    head = ["import triton", "import triton.language as tl", "", "", f"@triton.jit(do_not_specialize={list(loose)})"]
    return "\n".join([*head, f"def {KERNEL}({', '.join((*pointers, *integers))}):", *(f"    {line}" for line in body)]) + "\n"


@functools.lru_cache(maxsize=256)
def kernel_of(slots: tuple[Decoded, Decoded], dtype: torch.dtype, page: int) -> Any:
    """Return the Triton function that decodes keys and values from blocks of ``page`` tokens to ``dtype``, loaded; cached."""
    return getattr(load_module(decode_source(slots, dtype, page), "paged"), KERNEL)


def operands_of(
    slots: tuple[Decoded, Decoded], planes: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the planes that the kernel reads and their strides; ``planes``: of a pool [blocks, K, page, width], constant ones behind."""
    read: list[torch.Tensor] = []
    steps: list[int] = []
    for letter, slot, given in zip("KV", slots, planes, strict=True):
        for plane, _ in zip(given, plane_arguments(letter, slot), strict=False):
            batched = plane if plane.dim() == 5 else plane.unsqueeze(1)
            read.append(batched)
            steps += batched.stride()[:4]
    return read, steps
