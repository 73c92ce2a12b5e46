"""PTX of inline assembly, run in numpy: every lane of a warp at once, with shared memory, and floats as global memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

LANES = 32
ALL = np.uint64(0xFFFFFFFF)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt.b32``, with the sign of a byte where bit 3 of its selector is set."""
    either = np.stack([(side >> np.uint64(shift)) & np.uint64(255) for side in np.broadcast_arrays(a, b) for shift in (0, 8, 16, 24)], -1)
    result = np.zeros(np.broadcast_shapes(either.shape[:-1], np.shape(selector)), np.uint64)
    for place in range(4):
        each = (np.broadcast_to(selector, result.shape) >> np.uint64(4 * place)) & np.uint64(15)
        byte = np.take_along_axis(np.broadcast_to(either, (*result.shape, 8)), (each & np.uint64(7)).astype(int)[..., None], -1)[..., 0]
        byte = np.where(each & np.uint64(8), np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0)), byte)
        result |= byte << np.uint64(8 * place)
    return result


class Warp:
    """Registers by name, shared memory as bytes behind the names that were declared, and float32 ``memory`` addressed by byte."""

    def __init__(self, memory: np.ndarray | None = None) -> None:
        self.memory = np.zeros(0, np.float32) if memory is None else memory
        self.shared = np.zeros(1 << 16, np.uint8)
        self.names: dict[str, int] = {}
        self.end = 64

    def __call__(self, text: str, constraints: str, operands: list[Any]) -> list[np.ndarray]:
        """Run the statements on operands, an array of lanes each; the outputs as uint64."""
        results = constraints.count("=")
        assert len(constraints.split(",")) == results + len(operands), (constraints, len(operands))
        self.registers: dict[str, np.ndarray] = {"%laneid": np.arange(LANES, dtype=np.uint64)}
        self.registers |= {f"${results + at}": np.asarray(one, np.uint64) for at, one in enumerate(operands)}
        for statement in text.split(";"):
            # Braces around all statements of an operand's list have a space inside.
            name, _, rest = re.sub(r"^[{} ]+", "", statement).strip().partition(" ")
            if name in {"", ".reg", "bar.sync"}:
                continue
            if name == ".shared":
                self.declare(rest)
            else:
                self.step(name, [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)])
        return [self.registers[f"${at}"] for at in range(results)]

    def declare(self, rest: str) -> None:
        """``.align 16 .b8 name[size]``, once."""
        found = re.fullmatch(r"\.align (\d+) \.b8 (\w+)\[(\d+)\]", rest)
        assert found is not None and found[2] not in self.names, rest
        align = int(found[1])
        self.names[found[2]] = -(-self.end // align) * align
        self.end = self.names[found[2]] + int(found[3])

    def value(self, word: str) -> np.ndarray:
        if word in self.registers:
            return self.registers[word]
        if word in self.names:
            return np.uint64(self.names[word])
        return np.uint64(int(word.replace("0f", "0x") if word.startswith("0f") else word, 0))

    def address(self, word: str) -> np.ndarray:
        base, _, offset = word.strip("[] ").partition("+")
        return (self.value(base) + np.uint64(int(offset or 0))).astype(np.int64)

    def load(self, at: np.ndarray, size: int) -> np.ndarray:
        assert not (at % size).any() and (at < self.end).all(), "an address that is not aligned, or not declared"
        return sum((self.shared[at + byte].astype(np.uint64) << np.uint64(8 * byte) for byte in range(size)), np.zeros(at.shape, np.uint64))

    def step(self, name: str, words: list[str]) -> None:
        """One instruction."""
        kind, _, rest = name.partition(".")
        if name.startswith("st.shared"):
            size, at, value = int(name[-2:].strip("b")) // 8, *np.broadcast_arrays(self.address(words[0]), self.value(words[1]))
            assert not (at % size).any() and (at < self.end).all()
            for byte in range(size):
                self.shared[at + byte] = (value >> np.uint64(8 * byte)) & np.uint64(255)
            return
        if name.startswith("ld.shared.v"):
            for place, to in enumerate(words[0].strip("{}").split(",")):
                self.registers[to.strip()] = self.load(self.address(words[1]) + 4 * place, 4)
            return
        if kind == "mov" and words[0].startswith("{"):
            width = np.uint64(int(rest[1:]) // 2)
            for place, to in enumerate(words[0].strip("{}").split(",")):
                self.registers[to.strip()] = (self.value(words[1]) >> (width * np.uint64(place))) & np.uint64((1 << int(width)) - 1)
            return
        self.registers[words[0]] = self.result(name, kind, rest, words[1:])

    def result(self, name: str, kind: str, rest: str, words: list[str]) -> np.ndarray:
        if kind == "mov" and words[0].startswith("{"):
            low, high = (self.value(word.strip()) for word in words[0].strip("{}").split(","))
            return low | high << np.uint64(int(rest[1:]) // 2)
        if name.startswith("ld.shared"):
            size = int(rest.split(".")[1][1:]) // 8
            found = self.load(self.address(words[0]), size)
            signed = rest.split(".")[1][0] == "s"
            return np.where(signed & (found >> np.uint64(8 * size - 1) > 0), found | (ALL << np.uint64(8 * size) & ALL), found)
        if name == "ld.global.nc.f32":
            return self.memory[self.address(words[0]) // 4].view(np.uint32).astype(np.uint64)
        x = [self.value(word) for word in words]
        wide = np.uint64((1 << 64) - 1) if rest.endswith("64") or "wide" in rest else ALL if not rest.endswith("16") else np.uint64(0xFFFF)
        if kind == "setp":
            assert rest == "ne.u32"
            return x[0] != x[1]
        if kind == "selp":
            return np.where(x[2], x[0], x[1])
        if kind == "lop3":
            table, result = int(x[3]), np.zeros(np.broadcast_shapes(*(np.shape(one) for one in x[:3])), np.uint64)
            for row in range(8):
                if table >> row & 1:
                    result |= (x[0] if row & 4 else ~x[0]) & (x[1] if row & 2 else ~x[1]) & (x[2] if row & 1 else ~x[2])
            return result & ALL
        if kind == "prmt":
            return permuted(*x)
        if name == "cvt.rn.f16.f32":
            return x[0].astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint64)
        if name == "cvt.f32.f16":
            return x[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.uint64)
        if name == "mul.f32":
            a, b = (np.asarray(one).astype(np.uint32).view(np.float32) for one in x)
            return (a * b).view(np.uint32).astype(np.uint64)
        assert kind in {"mov", "shl", "shr", "and", "or", "xor", "add", "mul"}, f"no such instruction here: {name}"
        made = {
            "mov": lambda: x[0], "shl": lambda: x[0] << x[1], "shr": lambda: x[0] >> x[1], "and": lambda: x[0] & x[1],
            "or": lambda: x[0] | x[1], "xor": lambda: x[0] ^ x[1], "add": lambda: x[0] + x[1], "mul": lambda: x[0] * x[1],
        }[kind]()
        return made & wide
