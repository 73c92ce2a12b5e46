"""From PTX to Python: each statement a line on arrays of 32 lanes, each block a function of a warp.

A statement whose operation or type is not known raises ``NotImplementedError``; a result that is not as wide as its register raises when it
is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ptx_words
from ptx_words import HALVES, LANES, SIGNS, known

LABEL = re.compile(r"^(\$L__BB\d+_\d+):")
SIGNED = {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
INTEGERS = ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64")
SIZES = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
WIDTHS = {"%p": "bool_", "%rs": "uint16", "%r": "uint32", "%rd": "uint64"}
"""The NumPy dtype of a register, by the beginning of its name."""


@dataclasses.dataclass(frozen=True)
class Program:
    """PTX as Python: for each block a function of a warp that returns the next block, None at the end, or a barrier's next block."""

    blocks: dict[str, Callable[[Any], Any]]
    order: tuple[str, ...]
    parameters: tuple[str, ...]
    statics: tuple[tuple[str, int], ...] = ()
    """Shared memory that inline assembly declares: names and bytes."""


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
        """Set a register where the guard holds, to a value of its width."""
        if target == "_":
            return
        if guard is not None:
            value = f"np.where({guard}, {value}, r[{target!r}])"
        width = WIDTHS.get(target.rstrip("0123456789"))
        self.lines.append(f"r[{target!r}] = {value if width is None else f'of_width({value}, np.{width})'}")

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
        elif kind in HALVES:
            self.assign(guard, ops[0], f"by_halves(lambda x, y: x {sign} y, {a}, {b}, kind={kind!r})")
        else:
            known(kind, INTEGERS)
            self.assign(guard, ops[0], f"everywhere({a}) {sign} everywhere({b})")

    op_add = functools.partialmethod(_binary, sign="+")
    op_sub = functools.partialmethod(_binary, sign="-")

    def op_mul(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        if "wide" in parts:
            self.assign(guard, ops[0], self._wide(parts[-1], ops))
        elif "hi" in parts:
            known(parts[-1], ("s32", "u32"))
            self.assign(guard, ops[0], f"(({self._wide(parts[-1], ops)}) >> np.uint64(32)).astype(np.uint32)")
        else:
            self._binary(guard, parts, ops, "*")

    def _wide(self, kind: str, ops: list[str]) -> str:
        bits = 2 * int(known(kind, ("s16", "u16", "s32", "u32"))[1:])
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind in SIGNED:
            a, b = (f"as_signed({x}, np.int{bits // 2}).astype(np.int{bits})" for x in (a, b))
            return f"({a} * {b}).view(np.uint{bits})"
        return f"everywhere({a}).astype(np.uint{bits}) * everywhere({b}).astype(np.uint{bits})"

    def op_mad(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        c = literal(ops[3], f"b{2 * int(parts[-1][1:])}" if "wide" in parts else parts[-1])
        if "wide" in parts:
            self.assign(guard, ops[0], f"{self._wide(parts[-1], ops)} + everywhere({c})")
        else:
            known(f"{parts[1]}.{parts[-1]}", [f"lo.{kind}" for kind in INTEGERS])
            a, b = (literal(op, parts[-1]) for op in ops[1:3])
            self.assign(guard, ops[0], f"everywhere({a}) * everywhere({b}) + everywhere({c})")

    def op_fma(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b, c = (literal(op, parts[-1]) for op in ops[1:4])
        if parts[-1] in HALVES:
            self.assign(guard, ops[0], f"by_halves(lambda x, y, z: x.astype(np.float64) * y + z, {a}, {b}, {c}, kind={parts[-1]!r})")
        else:
            known(parts[-1], ("f32",))
            exact = f"as_float({a}).astype(np.float64) * as_float({b}) + as_float({c})"
            self.assign(guard, ops[0], f"({exact}).astype(np.float32).view(np.uint32)")

    def op_div(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        if parts[-1] == "f32":
            self.assign(guard, ops[0], f"(as_float({a}) / as_float({b})).view(np.uint32)")
        elif parts[-1] == "s32":
            self.assign(guard, ops[0], f"np.trunc(as_signed({a}) / as_signed({b})).astype(np.int32).view(np.uint32)")
        else:
            known(parts[-1], ("u16", "u32", "u64"))
            self.assign(guard, ops[0], f"everywhere({a}) // everywhere({b})")

    def op_rem(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        if parts[-1] == "s32":
            self.assign(guard, ops[0], f"np.fmod(as_signed({a}), as_signed({b})).view(np.uint32)")
        else:
            known(parts[-1], ("u16", "u32", "u64"))
            self.assign(guard, ops[0], f"everywhere({a}) % everywhere({b})")

    def _extreme(self, guard: str | None, parts: list[str], ops: list[str], name: str) -> None:
        kind = parts[-1]
        a, b = (literal(op, kind) for op in ops[1:3])
        if kind in FLOATS:
            f = f"np.{FLOATS[kind].__name__}"
            call = f"np.{name}" if "NaN" in parts else f"np.f{name[:3]}"
            self.assign(guard, ops[0], f"{call}(as_float({a}, {f}), as_float({b}, {f})).view(everywhere({a}).dtype)")
        elif kind in {"f16x2", "bf16x2"}:
            call = f"np.{name}" if "NaN" in parts else f"np.f{name[:3]}"
            self.assign(guard, ops[0], f"by_halves({call}, {a}, {b}, kind={kind!r})")
        elif kind in SIGNED:
            s = f"np.{SIGNED[kind].__name__}"
            self.assign(guard, ops[0], f"np.{name}(as_signed({a}, {s}), as_signed({b}, {s})).view(everywhere({a}).dtype)")
        else:
            known(kind, ("u16", "u32", "u64"))
            self.assign(guard, ops[0], f"np.{name}(everywhere({a}), everywhere({b}))")

    op_max = functools.partialmethod(_extreme, name="maximum")
    op_min = functools.partialmethod(_extreme, name="minimum")

    def op_abs(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = known(parts[-1], SIGNS)
        self.assign(guard, ops[0], f"everywhere({literal(ops[1], kind)}) & ~SIGNS[{kind!r}]")

    def op_popc(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        known(parts[1], ("b32",))
        self.assign(guard, ops[0], f"ones_of({literal(ops[1], 'b32')})")

    def op_neg(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = known(parts[-1], (*SIGNS, *SIGNED))
        a = f"everywhere({literal(ops[1], kind)})"
        self.assign(guard, ops[0], f"{a} ^ SIGNS[{kind!r}]" if kind in SIGNS else f"~{a} + {a}.dtype.type(1)")

    def _bitwise(self, guard: str | None, parts: list[str], ops: list[str], sign: str) -> None:
        a, b = (literal(op, parts[-1]) for op in ops[1:3])
        self.assign(guard, ops[0], f"everywhere({a}) {sign} everywhere({b})")

    op_and = functools.partialmethod(_bitwise, sign="&")
    op_or = functools.partialmethod(_bitwise, sign="|")
    op_xor = functools.partialmethod(_bitwise, sign="^")

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

    def op_shf(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        known(parts[3], ("b32",))
        low, high, count = (f"everywhere({literal(op, 'b32')}).astype(np.uint64)" for op in ops[1:4])
        # How far: modulo 32, or at most 32.
        far = f"({count} & np.uint64(31))" if parts[2] == "wrap" else f"np.minimum({count}, np.uint64(32))"
        both = f"(({high} << np.uint64(32)) | {low})"
        found = f"({both} >> {far})" if parts[1] == "r" else f"(({both} << {far}) >> np.uint64(32))"
        self.assign(guard, ops[0], f"({found} & np.uint64(0xFFFFFFFF)).astype(np.uint32)")

    def op_trap(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        self.lines.append(f"trapped({guard or 'True'})")

    def op_bfe(self, guard: str | None, parts: list[str], ops: list[str]) -> None:
        kind = known(parts[-1], ("u32", "s32", "u64", "s64"))
        a, first, count, width = literal(ops[1], f"b{kind[1:]}"), int(ops[2], 0), int(ops[3], 0), int(kind[1:])
        if kind.startswith("u"):
            self.assign(guard, ops[0], f"(everywhere({a}) >> np.uint{width}({first})) & np.uint{width}({(1 << count) - 1})")
        else:
            raised = f"as_signed(everywhere({a}) << np.uint{width}({width - first - count}), np.int{width})"
            self.assign(guard, ops[0], f"({raised} >> np.int{width}({width - count})).view(np.uint{width})")

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
            # Registers have 16 bits at least: a byte is extended as its type says.
            wide = max(int(to[1:]), 16)
            if source in SIGNED:
                found = f"as_signed({a}, np.{SIGNED[source].__name__})"
            else:
                found = f"everywhere({a}).astype(np.uint{source[1:]})"
            kind = "int" if to in SIGNED else "uint"
            self.assign(guard, ops[0], f"{found}.astype(np.{kind}{to[1:]}).astype(np.{kind}{wide}).view(np.uint{wide})")

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
            self._loaded(guard, ops[0], parts[-1], kind, f"np.full(LANES, w.params[{ops[1].strip('[]')!r}], np.{kind})")
            return
        targets = self._vector(ops[0])
        space = "shared" if "shared" in parts[1] else "global"
        self.lines.append(f"found = w.load({space!r}, {self._address(ops[1])}, np.{kind}, {len(targets)}, {self._mask(guard)})")
        for index, target in enumerate(targets):
            self._loaded(guard, target, parts[-1], kind, f"found[{index}]")

    def _loaded(self, guard: str | None, target: str, spelled: str, kind: str, value: str) -> None:
        """A value of ``kind`` in its register, which may be wider: signs are extended."""
        width = WIDTHS.get(target.rstrip("0123456789"), kind)
        signed = f".view(np.{kind[1:]}).astype(np.{width[1:]})" if spelled in SIGNED else ""
        self.assign(guard, target, f"{value}{signed}.astype(np.{width})")

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
    scope = {**vars(ptx_words), "ALL": np.ones(LANES, bool)}
    made = {}
    for at, (key, lines) in enumerate(blocks.items()):
        text = "\n    ".join([f"def block_{at}(w):", "r = w.r", *lines, ends[key]])
        exec(compile(text, f"<ptx {key}>", "exec"), scope)
        made[key] = scope[f"block_{at}"]
    statics = re.findall(r"\.shared \.align 16 \.b8 (\w+)\[(\d+)\]", ptx)
    return Program(made, tuple(order), parameters, tuple((name, int(size)) for name, size in statics))
