"""Hot loops of compiled kernels: their instructions, read from SASS, and their number per K or V element."""

from __future__ import annotations

import collections
import dataclasses
import re

from kvcompile.lowering.decode.config import AttendConfig
from kvcompile.lowering.decode.offline import sass


@dataclasses.dataclass(frozen=True)
class LoopCount:
    """Instructions of the hot loop, in total and by opcode, and the thread instructions per K or V element of one tile."""

    instructions: int
    per_element: float
    opcodes: dict[str, int]


def loop_of(cubin: bytes) -> list[str]:
    """Return the instructions of the hot loop, as text.

    It is the largest backward branch, among pipelined ones if there are any, since partly visible tiles have a second loop.
    """
    code, first, last, _ = _hot_loop(cubin)
    return code[first : last + 1]


def hot_way(cubin: bytes) -> list[str]:
    """Return the instructions of the hot loop that every step executes: parts that a branch can skip are left out, except copies ahead."""
    code, first, last, targets = _hot_loop(cubin)
    way, at = [], first
    while at <= last:
        way.append(code[at])
        then = targets.get(at, first)
        left_out = code[at + 1 : then]
        at = then if at < then <= last and not any(text.startswith("LDGSTS") for text in left_out) else at + 1
    return way


def _hot_loop(cubin: bytes) -> tuple[list[str], int, int, dict[int, int]]:
    """Return instructions as text, the first and the last index of the hot loop, and branch targets by the branch's index."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass(cubin).splitlines():
        label = re.match(r"\s*(\.L[\w]+):", line)
        if label:
            labels[label.group(1)] = len(code)
        found = re.match(r"\s*(?:/\*[0-9a-f]+\*/)?\s*(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\b(.*);", line)
        if found:
            code.append(f"{found.group(2)} {found.group(3)}")
    named = {at: re.search(r"(\.L[\w]+)", text) for at, text in enumerate(code) if text.startswith("BRA")}
    targets = {at: labels[name.group(1)] for at, name in named.items() if name is not None and name.group(1) in labels}
    loops: list[tuple[bool, int, int]] = [(False, 0, 0)]
    for at, start in targets.items():
        if start < at:
            loops.append((any(line.startswith("LDGSTS") for line in code[start:at]), at - start, start))
    _, length, start = max(loops)
    return code, start, start + length, targets


def instructions_per_element(config: AttendConfig, cubin: bytes) -> LoopCount:
    """Return the instructions that all warps issue for one tile, over the tile's K and V elements.

    1.0 is one thread instruction per element.
    """
    body = loop_of(cubin)
    opcodes = collections.Counter(text.split()[0].split(".")[0] for text in body)
    elements = config.tile.block_t * (config.key_dim + config.value_dim)
    issued = len(body) * config.tile.num_warps
    return LoopCount(len(body), issued * 32 / elements, dict(opcodes.most_common()))
