"""Runs PTX in numpy, a warp at a time: what a kernel that no interpreter knows computes, from what its compiler wrote.

Every statement becomes a line of Python on arrays of 32 lanes, block by block. What would be undefined is made to show: shared memory
begins as NaN, asynchronous copies arrive as late as their waits allow, accesses outside of the tensors raise, and so do branches that
lanes of a warp do not take together. Known is what the kernels of this project need.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ptx_words import integer_product, logic, permuted  # noqa: F401 - what translated blocks call

LANES = 32
BASE = 1 << 33
"""The address of the first tensor: beyond 32 bits, so that an address that is cut shows."""

LABEL = re.compile(r"^(\$L__BB\d+_\d+):")
BITS = {"pred": bool, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
SIGNED = {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
SIZES = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}


class Memory:
    """Tensors in one address space, as bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.places: dict[str, int] = {}
        at = 256
        raws = {name: stored(tensor) for name, tensor in tensors.items()}
        for name, raw in raws.items():
            self.places[name] = at
            at += -(-raw.size // 256) * 256 + 256
        self.bytes = np.zeros(at, np.uint8)
        self.owned = np.zeros(at, bool)
        for name, raw in raws.items():
            self.bytes[self.places[name] : self.places[name] + raw.size] = raw
            self.owned[self.places[name] : self.places[name] + raw.size] = True

    def address(self, name: str) -> int:
        """The address of a tensor."""
        return BASE + self.places[name]

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What a tensor holds now."""
        at = self.places[name]
        raw = self.bytes[at : at + like.numel() * like.element_size()].copy()
        return torch.from_numpy(raw).view(like.dtype).view(like.shape)

    def offsets(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        """Places in ``bytes``; raises where one is outside of the tensors or not aligned."""
        offsets = (addresses - np.uint64(BASE)).astype(np.int64)
        used = offsets[mask]
        if used.size and (used.min() < 0 or used.max() + size > self.bytes.size):
            raise IndexError(f"an access outside of all tensors: {addresses[mask]}")
        if not (self.owned[used].all() and self.owned[used + size - 1].all()):
            raise IndexError("an access between tensors")
        if (used % size).any():
            raise IndexError("an access that is not aligned")
        return np.where(mask, offsets, 0)


def stored(tensor: torch.Tensor) -> np.ndarray:
    """The bytes that a tensor's strides lead to, as they lie in memory."""
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).contiguous().view(torch.uint8).numpy()


@dataclasses.dataclass(frozen=True)
class Program:
    """PTX as Python: for each block a function of a warp that returns the next block, None at the end, or a barrier's next block."""

    blocks: dict[str, Callable[[Warp], Any]]
    order: tuple[str, ...]
    parameters: tuple[str, ...]
    statics: tuple[tuple[str, int], ...] = ()
    """Shared memory that inline assembly declares: names and bytes."""


class Registers(dict[str, Any]):
    """Registers by name; one that nobody set holds a NaN, as the other half of a number that is alone in a pair does."""

    def __missing__(self, name: str) -> Any:
        kind = {"%rs": np.uint16, "%rd": np.uint64}.get(name[:3], np.uint32)
        return np.full(LANES, 0x7FFF7FFF7FFF7FFF & int(np.iinfo(kind).max), kind)


class Warp:
    """The registers of 32 lanes, and the memories that they see."""

    def __init__(
        self, index: int, grid: Sequence[int], program: Sequence[int], memory: Memory, shared: np.ndarray, params: Mapping[str, int]
    ) -> None:
        self.r = Registers()
        self.index, self.grid, self.program, self.memory, self.shared, self.params = index, grid, program, memory, shared, params
        self.copies: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
        self.counts: dict[str, int] = {}

    def special(self, name: str) -> np.ndarray:
        """The value of a special register."""
        lanes = np.arange(LANES, dtype=np.uint32)
        what, _, axis = name.partition(".")
        if what == "tid":
            return lanes + np.uint32(LANES * self.index) if axis == "x" else lanes * np.uint32(0)
        if what == "laneid":
            return lanes
        values = {"ctaid": self.program, "nctaid": self.grid}[what]
        return np.full(LANES, values["xyz".index(axis)], np.uint32)

    def load(self, space: str, addresses: np.ndarray, kind: Any, count: int, mask: np.ndarray) -> list[np.ndarray]:
        """``count`` neighbors a lane."""
        size = np.dtype(kind).itemsize
        store, at = self._places(space, addresses, size * count, mask)
        words = store[at[:, None] + np.arange(size * count)].view(kind)
        return [words[:, index].copy() for index in range(count)]

    def store(self, space: str, addresses: np.ndarray, values: Sequence[np.ndarray], kind: Any, mask: np.ndarray) -> None:
        """Write neighbors of a lane."""
        size = np.dtype(kind).itemsize
        words = np.stack([np.broadcast_to(np.asarray(value), LANES).astype(kind) for value in values], 1).copy()
        store, at = self._places(space, addresses, size * len(values), mask)
        places = at[:, None] + np.arange(size * len(values))
        store[places[mask]] = words.view(np.uint8).reshape(LANES, -1)[mask]

    def _places(self, space: str, addresses: np.ndarray, size: int, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if space == "global":
            return self.memory.bytes, self.memory.offsets(np.broadcast_to(addresses, LANES), size, mask)
        at = np.broadcast_to(addresses, LANES).astype(np.int64)
        if (at[mask] + size > self.shared.size).any() or (at[mask] % size).any():
            raise IndexError("an access outside of shared memory, or not aligned")
        return self.shared, np.where(mask, at, 0)

    def copy(self, to: np.ndarray, source: np.ndarray, size: int, mask: np.ndarray, given: Any = None) -> None:
        """An asynchronous copy: it is kept until somebody waits for it. ``given``: the size, or 0 for lanes that get zeros."""
        there = mask & (np.broadcast_to(size if given is None else given, LANES) != 0)
        at = np.where(there, self.memory.offsets(np.broadcast_to(source, LANES), size, there), 0)
        place = np.broadcast_to(to, LANES).astype(np.int64)
        if (place[mask] + size > self.shared.size).any() or (place[mask] % size).any():
            raise IndexError("a copy outside of shared memory")
        span = np.arange(size)
        self.shared[(place[:, None] + span)[mask]] = 0xFF
        self.copies[-1].append(((place[:, None] + span)[mask], (at[:, None] + span)[mask]))

    def commit(self) -> None:
        """Close a group of copies."""
        self.copies.append([])

    def wait(self, left: int) -> None:
        """Let all groups arrive but the newest ``left``."""
        while len(self.copies) - 1 > left:
            for to, source in self.copies.pop(0):
                self.shared[to] = self.memory.bytes[source]

    def atomic(self, name: str, kind: str, addresses: np.ndarray, value: Any, mask: np.ndarray) -> np.ndarray:
        """Lane after lane; the old values."""
        old = np.zeros(LANES, np.uint32)
        at = self.memory.offsets(np.broadcast_to(addresses, LANES), 4, mask)
        words, values = self.memory.bytes.view(np.uint32), np.broadcast_to(np.asarray(value, np.uint32), LANES)
        for lane in np.flatnonzero(mask):
            word = at[lane] // 4
            old[lane] = words[word]
            words[word] = words[word] + values[lane] if name == "add" else values[lane]
        return old


def product(a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray], kind: str) -> list[np.ndarray]:
    """m16n8k16 on fragments: four registers of float32 a lane."""
    lane = np.arange(LANES)
    g, t = lane // 4, lane % 4
    left, right, into = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    for index, register in enumerate(a):
        low, high = halves(register, kind)
        row, column = g + 8 * (index % 2), 2 * t + 8 * (index // 2)
        left[row, column], left[row, column + 1] = low, high
    for index, register in enumerate(b):
        low, high = halves(register, kind)
        right[2 * t + 8 * index, g], right[2 * t + 8 * index + 1, g] = low, high
    for index, register in enumerate(c):
        into[g + 8 * (index // 2), 2 * t + index % 2] = np.broadcast_to(register, LANES).view(np.float32)
    with np.errstate(all="ignore"):
        result = (left.astype(np.float64) @ right.astype(np.float64) + into).astype(np.float32)
    return [result[g + 8 * (index // 2), 2 * t + index % 2].view(np.uint32) for index in range(4)]


def halves(register: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The two 16-bit floats of a register, widened."""
    words = np.broadcast_to(np.asarray(register, np.uint32), LANES)
    low, high = (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)
    if kind == "bf16":
        return tuple((half.astype(np.uint32) << np.uint32(16)).view(np.float32) for half in (low, high))  # type: ignore[return-value]
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit words in a register."""
    return np.asarray(low).astype(np.uint16).astype(np.uint32) | (np.asarray(high).astype(np.uint16).astype(np.uint32) << np.uint32(16))


def by_halves(function: Callable[..., np.ndarray], *registers: np.ndarray) -> np.ndarray:
    """A function of float16 on both halves of registers."""
    words = [np.broadcast_to(np.asarray(register, np.uint32), LANES) for register in registers]
    parts = [
        function(*(((word >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16) for word in words))
        for shift in (0, 16)
    ]
    return packed(*(part.astype(np.float16).view(np.uint16) for part in parts))


def transposed(register: np.ndarray) -> np.ndarray:
    """movmatrix: an 8 x 8 of 16-bit words, transposed."""
    words = np.broadcast_to(register, LANES)
    lane = np.arange(LANES)
    matrix = np.zeros((8, 8), np.uint16)
    matrix[lane // 4, 2 * (lane % 4)] = words & np.uint32(0xFFFF)
    matrix[lane // 4, 2 * (lane % 4) + 1] = words >> np.uint32(16)
    return packed(matrix.T[lane // 4, 2 * (lane % 4)], matrix.T[lane // 4, 2 * (lane % 4) + 1])


def matrices(warp: Warp, addresses: np.ndarray, count: int, turned: bool) -> list[np.ndarray]:
    """ldmatrix: 8 x 8 of 16-bit words, whose rows eight lanes each point to."""
    found, lane = [], np.arange(LANES)
    for index in range(count):
        rows = np.broadcast_to(addresses, LANES)[8 * index + lane // 4]
        words = warp.load("shared", rows + (4 * (lane % 4)).astype(rows.dtype), np.uint32, 1, np.ones(LANES, bool))[0]
        found.append(transposed(words) if turned else words)
    return found


def store_matrices(warp: Warp, addresses: np.ndarray, registers: Sequence[np.ndarray], turned: bool) -> None:
    """stmatrix: the way back of ``matrices``."""
    lane = np.arange(LANES)
    for index, words in enumerate(registers):
        rows = np.broadcast_to(addresses, LANES)[8 * index + lane // 4]
        found = transposed(words) if turned else words
        warp.store("shared", rows + (4 * (lane % 4)).astype(rows.dtype), [found], np.uint32, np.ones(LANES, bool))


def exchanged(value: Any, other: Any, mode: str, width: int) -> np.ndarray:
    """shfl of whole warps."""
    lane = np.arange(LANES)
    step = np.broadcast_to(np.asarray(other), LANES).astype(np.int64)
    source = {"bfly": lane ^ step, "idx": step % LANES, "down": lane + step, "up": lane - step}[mode]
    source = np.where((source < 0) | (source >= LANES), lane, source)
    return np.broadcast_to(np.asarray(value, np.uint32), LANES)[source]


def reduced(value: Any, name: str) -> np.ndarray:
    """redux over the warp, of signed numbers."""
    numbers = np.broadcast_to(value, LANES).view(np.int32)
    found = {"max": numbers.max, "min": numbers.min, "add": numbers.sum}[name]()
    return np.full(LANES, found, np.int32).view(np.uint32)


def rounded_to_bfloat(value: Any) -> np.ndarray:
    """Float32 to the bits of bfloat16, to nearest even."""
    found = torch.from_numpy(np.array(np.broadcast_to(value, LANES), np.uint32).view(np.float32)).to(torch.bfloat16)
    return found.view(torch.int16).numpy().view(np.uint16)


def flushed(value: np.ndarray) -> np.ndarray:
    """Float32 without numbers below the normal ones."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.float32(0), value)


def as_float(value: Any, kind: Any = np.float32) -> np.ndarray:
    """A register's bits as floats."""
    bits = {np.float32: np.uint32, np.float16: np.uint16, np.float64: np.uint64}[kind]
    return np.broadcast_to(np.asarray(value, bits), LANES).copy().view(kind)


def as_signed(value: Any, kind: Any = np.int32) -> np.ndarray:
    """A register's bits as a signed number."""
    bits = np.dtype(kind).str.replace("i", "u")
    return np.broadcast_to(np.asarray(value).astype(bits), LANES).copy().view(kind)


def everywhere(value: Any) -> np.ndarray:
    """A value of every lane."""
    return np.broadcast_to(value, LANES)


# --- from statements to lines of Python


def statements(ptx: str) -> Iterator[str]:
    """Labels and statements of the first entry, without scopes and debug notes."""
    body = ptx[ptx.index("{\n", ptx.index(".visible .entry")) :]
    for line in body.splitlines():
        text = line.partition("//")[0].strip()
        label = LABEL.match(text)
        if label:
            yield text
            continue
        if text.startswith(("$L__tmp", "$L__func", ".loc", ".file", ".section")) or not text:
            if text.startswith(".section"):
                return
            continue
        # Scopes of inline assembly: braces that stand alone or before a declaration; others are vectors.
        text = re.sub(r"^\{\s*(?=\.reg|[a-z@])", "", text)
        text = re.sub(r";\s*\}$", ";", text)
        for part in filter(None, (re.sub(r"^\}\s*", "", piece.strip()) for piece in text.split(";"))):
            if part not in {"{", "}"} and not part.startswith((".reg", ".pragma", ".shared")):
                yield part


def split_operands(text: str) -> list[str]:
    """Operands, vectors in one piece."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def literal(text: str, kind: str) -> str:
    """An operand as Python: a register, a number of a type, a special register, shared memory's address."""
    if text.startswith("%") and re.match(r"%(tid|ctaid|nctaid|laneid)", text):
        return f"w.special({text[1:]!r})"
    if re.match(r"[%A-Za-z_]", text) and not text.startswith("0"):
        return "np.uint32(0)" if text == "global_smem" else f"r[{text!r}]"
    bits = SIZES.get(re.sub(r"\D", "", kind) or "32", np.uint32).__name__ if kind != "pred" else "bool"
    if text.startswith("0f"):
        return f"np.uint32(0x{text[2:]})"
    value = int(text, 0)
    if kind == "pred":
        return str(bool(value))
    width = np.dtype(getattr(np, bits)).itemsize * 8
    return f"np.{bits}({value % (1 << width)})"


class Translator:
    """One statement to lines that set registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def assign(self, guard: str | None, target: str, value: str) -> None:
        """Set a register where the guard holds."""
        if target == "_":
            return
        if guard is None:
            self.lines.append(f"r[{target!r}] = {value}")
        else:
            self.lines.append(f"r[{target!r}] = np.where({guard}, {value}, r.get({target!r}, 0))")

    def translate(self, statement: str) -> None:
        """Append the lines of a statement that does not end a block."""
        guard = None
        found = re.match(r"@(!?)(%\w+)\s+(.*)", statement)
        if found:
            guard = f"everywhere({'~' if found.group(1) else ''}r[{found.group(2)!r}])"
            statement = found.group(3)
        name, _, rest = statement.partition(" ") if "\t" not in statement else statement.partition("\t")
        if " " in name:
            name, _, more = name.partition(" ")
            rest = more + rest
        operands, parts = split_operands(rest.strip()), name.split(".")
        method = getattr(self, f"op_{parts[0]}", None)
        if method is None:
            raise NotImplementedError(statement)
        method(guard, parts, operands)

    def _mask(self, guard: str | None) -> str:
        return guard or "ALL"

    def _vector(self, text: str) -> list[str]:
        return [part.strip() for part in text.strip("{} ").split(",")] if text.startswith("{") else [text]

    def op_mov(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        if ops[0].startswith("{"):
            low, high = self._vector(ops[0])
            source = literal(ops[1], parts[1])
            half, whole = ("uint16", "uint32") if parts[1] == "b32" else ("uint32", "uint64")
            shift = 16 if parts[1] == "b32" else 32
            self.assign(guard, low, f"everywhere({source}).astype(np.{half})")
            self.assign(guard, high, f"(everywhere({source}) >> np.{whole}({shift})).astype(np.{half})")
        elif ops[1].startswith("{"):
            low, high = (literal(part, "b16" if parts[1] == "b32" else "b32") for part in self._vector(ops[1]))
            if parts[1] == "b32":
                self.assign(guard, ops[0], f"packed({low}, {high})")
            else:
                self.assign(guard, ops[0], f"everywhere({low}).astype(np.uint64) | (everywhere({high}).astype(np.uint64) << np.uint64(32))")
        else:
            self.assign(guard, ops[0], f"everywhere({literal(ops[1], parts[1])}).copy()")

    def _binary(self, guard: str | None, parts: list[str], ops: list[str], sign: str) -> None:
        kind = parts[-1]
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind in FLOATS:
            f = f"np.{FLOATS[kind].__name__}"
            self.assign(guard, ops[0], f"(as_float({a}, {f}) {sign} as_float({b}, {f})).view(everywhere({a}).dtype)")
        elif kind == "f16x2":
            self.assign(guard, ops[0], f"by_halves(lambda x, y: x {sign} y, {a}, {b})")
        else:
            self.assign(guard, ops[0], f"everywhere({a}) {sign} everywhere({b})")

    def op_add(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._binary(guard, parts, ops, "+")

    def op_sub(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._binary(guard, parts, ops, "-")

    def op_mul(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        if "wide" in parts or "hi" in parts:
            wide = self._wide(parts[-1], ops)
            self.assign(guard, ops[0], wide if "wide" in parts else f"(({wide}) >> np.uint64(32)).astype(np.uint32)")
        else:
            self._binary(guard, parts, ops, "*")

    def _wide(self, kind: str, ops: list[str]) -> str:
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind.startswith("s"):
            return f"(as_signed({a}).astype(np.int64) * as_signed({b}).astype(np.int64)).view(np.uint64)"
        return f"everywhere({a}).astype(np.uint64) * everywhere({b}).astype(np.uint64)"

    def op_mad(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        c = literal(ops[3], "b64" if "wide" in parts else parts[-1])
        if "wide" in parts:
            self.assign(guard, ops[0], f"{self._wide(parts[-1], ops)} + everywhere({c})")
        else:
            a, b = (literal(op, parts[-1]) for op in ops[1:3])
            self.assign(guard, ops[0], f"everywhere({a}) * everywhere({b}) + everywhere({c})")

    def op_fma(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b, c = (literal(op, parts[-1]) for op in ops[1:4])
        if parts[-1] == "f16x2":
            self.assign(guard, ops[0], f"by_halves(lambda x, y, z: x.astype(np.float64) * y + z, {a}, {b}, {c})")
        else:
            exact = f"as_float({a}).astype(np.float64) * as_float({b}) + as_float({c})"
            self.assign(guard, ops[0], f"({exact}).astype(np.float32).view(np.uint32)")

    def op_div(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        if parts[-1] == "f32":
            self.assign(guard, ops[0], f"(as_float({a}) / as_float({b})).view(np.uint32)")
        elif parts[-1].startswith("s"):
            self.assign(guard, ops[0], f"np.trunc(as_signed({a}) / as_signed({b})).astype(np.int32).view(np.uint32)")
        else:
            self.assign(guard, ops[0], f"everywhere({a}) // everywhere({b})")

    def op_rem(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        if parts[-1].startswith("s"):
            self.assign(guard, ops[0], f"np.fmod(as_signed({a}), as_signed({b})).view(np.uint32)")
        else:
            self.assign(guard, ops[0], f"everywhere({a}) % everywhere({b})")

    def _extreme(self, guard: str | None, parts: list[str], ops: list[str], name: str) -> None:
        kind = parts[-1]
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind in FLOATS:
            f = f"np.{FLOATS[kind].__name__}"
            call = f"np.{name}" if "NaN" in parts else f"np.f{name[:3]}"
            self.assign(guard, ops[0], f"{call}(as_float({a}, {f}), as_float({b}, {f})).view(everywhere({a}).dtype)")
        elif kind == "f16x2":
            self.assign(guard, ops[0], f"by_halves(np.f{name[:3]}, {a}, {b})")
        elif kind.startswith("s"):
            s = f"np.{SIGNED[kind].__name__}"
            self.assign(guard, ops[0], f"np.{name}(as_signed({a}, {s}), as_signed({b}, {s})).view(everywhere({a}).dtype)")
        else:
            self.assign(guard, ops[0], f"np.{name}(everywhere({a}), everywhere({b}))")

    def op_max(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._extreme(guard, parts, ops, "maximum")

    def op_min(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._extreme(guard, parts, ops, "minimum")

    def op_abs(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        masks = {"f32": 0x7FFFFFFF, "f16x2": 0x7FFF7FFF, "f16": 0x7FFF}
        kind = "uint16" if parts[-1] == "f16" else "uint32"
        self.assign(guard, ops[0], f"everywhere({literal(ops[1], parts[-1])}) & np.{kind}({masks[parts[-1]]})")

    def op_neg(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a = literal(ops[1], parts[-1])
        if parts[-1] == "f32":
            self.assign(guard, ops[0], f"everywhere({a}) ^ np.uint32(0x80000000)")
        elif parts[-1] == "f16x2":
            self.assign(guard, ops[0], f"everywhere({a}) ^ np.uint32(0x80008000)")
        else:
            self.assign(guard, ops[0], f"(-as_signed({a})).view(np.uint32)")

    def op_and(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._bitwise(guard, parts, ops, "&")

    def op_or(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._bitwise(guard, parts, ops, "|")

    def op_xor(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self._bitwise(guard, parts, ops, "^")

    def _bitwise(self, guard: str | None, parts: list[str], ops: list[str], sign: str) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        self.assign(guard, ops[0], f"everywhere({a}) {sign} everywhere({b})")

    def op_not(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0], f"~everywhere({literal(ops[1], parts[-1])})")

    def op_shl(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a = literal(ops[1], parts[-1])
        self.assign(guard, ops[0], f"everywhere({a}) << everywhere({literal(ops[2], 'b32')}).astype(everywhere({a}).dtype)")

    def op_shr(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = literal(ops[1], parts[-1]), literal(ops[2], "b32")
        if parts[-1].startswith("s"):
            s = f"np.{SIGNED[parts[-1]].__name__}"
            self.assign(guard, ops[0], f"(as_signed({a}, {s}) >> everywhere({b}).astype({s})).view(everywhere({a}).dtype)")
        else:
            self.assign(guard, ops[0], f"everywhere({a}) >> everywhere({b}).astype(everywhere({a}).dtype)")

    def op_bfe(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, first, count = literal(ops[1], "b32"), int(ops[2], 0), int(ops[3], 0)
        if parts[-1] == "u32":
            self.assign(guard, ops[0], f"(everywhere({a}) >> np.uint32({first})) & np.uint32({(1 << count) - 1})")
        else:
            raised = f"as_signed(everywhere({a}) << np.uint32({32 - first - count}))"
            self.assign(guard, ops[0], f"({raised} >> np.int32({32 - count})).view(np.uint32)")

    def op_prmt(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = (literal(op, "b32") for op in ops[1:3])
        self.assign(guard, ops[0], f"permuted({a}, {b}, {literal(ops[3].removesuffix('U'), 'b32')})")

    def op_lop3(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b, c = (literal(op, "b32") for op in ops[1:4])
        self.assign(guard, ops[0], f"logic({a}, {b}, {c}, {int(ops[4], 0)})")

    def op_selp(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b, p = literal(ops[1], parts[-1]), literal(ops[2], parts[-1]), literal(ops[3], "pred")
        self.assign(guard, ops[0], f"np.where(everywhere({p}), {a}, {b})")

    def op_setp(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = parts[-1]
        signs = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
        compare, unordered = parts[1], parts[1] in {"ltu", "leu", "gtu", "geu", "equ", "neu"}
        compare = compare[:-1] if unordered else compare
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind in FLOATS:
            f = f"np.{FLOATS[kind].__name__}"
            a, b = f"as_float({a}, {f})", f"as_float({b}, {f})"
            if parts[1] in {"nan", "num"}:
                either = f"(np.isnan({a}) | np.isnan({b}))"
                self.assign(guard, ops[0], either if parts[1] == "nan" else f"~{either}")
                return
        elif kind in SIGNED:
            s = f"np.{SIGNED[kind].__name__}"
            a, b = f"as_signed({a}, {s})", f"as_signed({b}, {s})"
        found = f"(everywhere({a}) {signs[compare]} everywhere({b}))"
        if unordered:
            found = f"({found} | np.isnan({a}) | np.isnan({b}))"
        elif compare == "ne" and kind in FLOATS:
            found = f"({found} & ~np.isnan({a}) & ~np.isnan({b}))"
        self.assign(guard, ops[0], found)

    def op_cvt(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        to, source = parts[-2], parts[-1]
        if to in {"f16x2", "bf16x2"}:
            high, low = (literal(op, source) for op in ops[1:3])
            if to == "bf16x2":
                self.assign(guard, ops[0], f"packed(rounded_to_bfloat({low}), rounded_to_bfloat({high}))")
            elif source == "e4m3x2":
                raise NotImplementedError
            else:
                half = "as_float({}).astype(np.float16).view(np.uint16)"
                self.assign(guard, ops[0], f"packed({half.format(low)}, {half.format(high)})")
            return
        a = literal(ops[1], source)
        if source == "bf16":
            self.assign(guard, ops[0], f"everywhere({a}).astype(np.uint32) << np.uint32(16)")
        elif to == "bf16":
            self.assign(guard, ops[0], f"rounded_to_bfloat({a})")
        elif source in FLOATS and to in FLOATS:
            f, g = FLOATS[source].__name__, FLOATS[to].__name__
            bits = {"f16": "uint16", "f32": "uint32", "f64": "uint64"}[to]
            self.assign(guard, ops[0], f"as_float({a}, np.{f}).astype(np.{g}).view(np.{bits})")
        elif to in FLOATS:
            value = f"as_signed({a}, np.{SIGNED[source].__name__})" if source in SIGNED else f"everywhere({a})"
            self.assign(guard, ops[0], f"{value}.astype(np.{FLOATS[to].__name__}).view(np.uint{to[1:]})")
        elif source in FLOATS:
            assert parts[1:] == ["rzi", "s32", "f32"], parts
            cut = f"np.nan_to_num(np.trunc(as_float({a}))).clip(-(2.0**31), 2.0**31 - 128)"
            self.assign(guard, ops[0], f"{cut}.astype(np.int32).view(np.uint32)")
        else:
            bits = f"np.uint{to[1:]}"
            if source in SIGNED:
                self.assign(guard, ops[0], f"as_signed({a}, np.{SIGNED[source].__name__}).astype(np.int{to[1:]}).view({bits})")
            else:
                self.assign(guard, ops[0], f"everywhere({a}).astype(np.uint{source[1:]}).astype({bits})")

    def op_ex2(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a = literal(ops[1], "f32")
        self.assign(guard, ops[0], f"flushed(np.exp2(as_float({a}))).view(np.uint32)")

    def op_lg2(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0], f"np.log2(as_float({literal(ops[1], 'f32')})).view(np.uint32)")

    def op_rcp(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0], f"(np.float32(1) / as_float({literal(ops[1], 'f32')})).view(np.uint32)")

    def _address(self, text: str) -> str:
        base, _, offset = text.strip("[] ").partition("+")
        base = base.strip()
        where = literal(base, "b64")
        return f"everywhere({where}) + everywhere({where}).dtype.type({int(offset.strip() or '0', 0)})"

    def op_ld(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = SIZES[re.sub(r"\D", "", parts[-1])].__name__
        if parts[1] == "param":
            self.assign(guard, ops[0], f"np.full(LANES, w.params[{ops[1].strip('[]')!r}], np.{kind})")
            return
        targets = self._vector(ops[0])
        space = "shared" if "shared" in parts[1] else "global"
        self.lines.append(f"found = w.load({space!r}, {self._address(ops[1])}, np.{kind}, {len(targets)}, {self._mask(guard)})")
        wider = ".astype(np.int8).astype(np.int32).view(np.uint32)" if parts[-1] == "s8" else ""
        wider = ".astype(np.uint16)" if parts[-1] in {"u8", "b8"} else ".astype(np.uint32)" if parts[-1] == "u16" else wider
        for index, target in enumerate(targets):
            self.assign(guard, target, f"found[{index}]{wider}")

    def op_st(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = SIZES[re.sub(r"\D", "", parts[-1])].__name__
        values = ", ".join(literal(part, parts[-1]) for part in self._vector(ops[1]))
        space = "shared" if "shared" in parts[1] else "global"
        self.lines.append(f"w.store({space!r}, {self._address(ops[0])}, [{values}], np.{kind}, {self._mask(guard)})")

    def op_cp(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        if "commit_group" in parts:
            self.lines.append("w.commit()")
        elif "wait_group" in parts:
            self.lines.append(f"w.wait({int(ops[0])})")
        else:
            given = f", {literal(ops[3], 'b32')}" if len(ops) > 3 else ""
            self.lines.append(f"w.copy({self._address(ops[0])}, {self._address(ops[1])}, {int(ops[2], 0)}, {self._mask(guard)}{given})")

    def op_atom(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        name = next(part for part in parts if part in {"add", "exch"})
        self.lines.append(f"found = w.atomic({name!r}, '', {self._address(ops[1])}, {literal(ops[2], 'b32')}, {self._mask(guard)})")
        self.assign(guard, ops[0], "found")

    def op_shfl(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0].partition("|")[0], f"exchanged({literal(ops[1], 'b32')}, {literal(ops[2], 'b32')}, {parts[2]!r}, 31)")

    def op_redux(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0], f"reduced({literal(ops[1], 'b32')}, {parts[2]!r})")

    def op_movmatrix(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.assign(guard, ops[0], f"transposed({literal(ops[1], 'b32')})")

    def op_ldmatrix(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        targets = self._vector(ops[0])
        self.lines.append(f"found = matrices(w, {self._address(ops[1])}, {len(targets)}, {'trans' in parts})")
        for index, target in enumerate(targets):
            self.assign(guard, target, f"found[{index}]")

    def op_stmatrix(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        values = ", ".join(literal(part, "b32") for part in self._vector(ops[1]))
        self.lines.append(f"store_matrices(w, {self._address(ops[0])}, [{values}], {'trans' in parts})")

    def op_mma(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b, c = (", ".join(literal(part, "b32") for part in self._vector(op)) for op in ops[1:4])
        if "m16n8k32" in parts:
            assert parts[-4:] == ["s32", "s8", "s8", "s32"], parts
            self.lines.append(f"found = integer_product([{a}], [{b}], [{c}])")
        else:
            assert "m16n8k16" in parts and parts[-4] == "f32", parts
            self.lines.append(f"found = product([{a}], [{b}], [{c}], {parts[-3]!r})")
        for index, target in enumerate(self._vector(ops[0])):
            self.assign(guard, target, f"found[{index}]")

    def op_fence(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        """Programs run one after the other."""

    op_membar = op_fence
    # Launches run one after the other, so nothing is to be waited for.
    op_griddepcontrol = op_fence


def translate(ptx: str) -> Program:
    """The first entry of a module."""
    parameters = tuple(re.findall(r"\.param [^\n]*?(\w+_param_\d+)", ptx[: ptx.index(".reqntid")] if ".reqntid" in ptx else ptx))
    blocks: dict[str, list[str]] = {}
    ends: dict[str, str] = {}
    order: list[str] = []
    count = 0

    def begin(name: str) -> Translator:
        order.append(name)
        return Translator()

    name = "entry"
    current = begin(name)

    def finish(end: str) -> None:
        blocks[name], ends[name] = current.lines, end

    for statement in statements(ptx):
        label = LABEL.match(statement)
        following = None
        if label:
            finish(f"return {label.group(1)!r}")
            following = label.group(1)
        elif "bra" in statement.replace("\t", " ").split(" ")[0 if not statement.startswith("@") else 1]:
            target = re.search(r"(\$L__BB\d+_\d+)", statement).group(1)  # type: ignore[union-attr]
            count += 1
            following = f"after_{count}"
            guard = re.match(r"@(!?)(%\w+)", statement)
            if guard:
                condition = f"{'~' if guard.group(1) else ''}everywhere(r[{guard.group(2)!r}])"
                finish(f"return {target!r} if together({condition}) else {following!r}")
            else:
                finish(f"return {target!r}")
        elif statement in {"ret", "exit"}:
            count += 1
            following = f"after_{count}"
            finish("return None")
        elif statement.startswith(("bar.sync", "bar.warp", "barrier.sync")):
            count += 1
            following = f"after_{count}"
            finish(f"return ('barrier', {following!r})")
        else:
            try:
                current.translate(statement)
            except (KeyError, ValueError, IndexError) as error:
                raise NotImplementedError(statement) from error
        if following is not None:
            name = following
            current = begin(name)
    finish("return None")
    scope = {**globals(), "ALL": np.ones(LANES, bool)}
    made = {}
    for at, (key, lines) in enumerate(blocks.items()):
        text = "\n    ".join([f"def block_{at}(w):", "r = w.r", *lines, ends[key]])
        exec(compile(text, f"<ptx {key}>", "exec"), scope)
        made[key] = scope[f"block_{at}"]
    statics = re.findall(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", ptx)
    return Program(made, tuple(order), parameters, tuple((name, int(size)) for name, size in statics))


def together(condition: np.ndarray) -> bool:
    """A condition that all lanes agree on."""
    if condition.all() != condition.any():
        raise RuntimeError("lanes of a warp take different ways")
    return bool(condition[0])


def run(program: Program, shared: int, warps: int, grid: tuple[int, int, int], memory: Memory, arguments: Sequence[int]) -> None:
    """Run a grid, one program after the other; ``arguments``: the bits of all parameters, those that nobody gives are 0."""
    given = [*arguments, *([0] * (len(program.parameters) - len(arguments)))]
    params = dict(zip(program.parameters, given, strict=True))
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    run_program(program, shared, warps, grid, (x, y, z), memory, params)


def run_program(
    program: Program, shared: int, warps: int, grid: Sequence[int], at: Sequence[int], memory: Memory, params: Mapping[str, int]
) -> None:
    """Run the warps of one program, all up to each barrier."""
    places_of, end = {}, -(-shared // 16) * 16
    for name, size in program.statics:
        places_of[name], end = np.full(LANES, end, np.uint32), end + -(-size // 16) * 16
    store = np.full(max(end, 16), 0xFF, np.uint8)
    every = [Warp(index, grid, at, memory, store, params) for index in range(warps)]
    for warp in every:
        warp.r.update(places_of)
    places: list[str | None] = [program.order[0]] * warps
    while any(place is not None for place in places):
        for index, warp in enumerate(every):
            place: Any = places[index]
            while place is not None:
                place = program.blocks[place](warp)
                if isinstance(place, tuple):
                    place = place[1]
                    break
            places[index] = place
        assert len({place is None for place in places}) == 1, "some warps ended before a barrier"
