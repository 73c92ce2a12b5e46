"""Time of smartkv's attention over buckets, one new token, beside SDPA over bfloat16, and of deciding the widths of all tokens.

    python benchmarks/smartkv_attention.py [--scheme 'smartkv(budget=0.3)'] [--shapes 1x131072,8x32768] [--json FILE]

H=32 query heads, K=8 kv heads, D=128, bfloat16; medians over CUDA-graph replays. Importance is random to the eighth power, so a few tokens
have most of it; codes are random. Correctness first: the kernels against the definition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention import D, H, K, graph_ms, sdpa_ms
from kvcompile import schemes
from kvcompile.lowering.host.launches import Direct
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.smartkv.attend import attend_by_definition
from kvcompile.lowering.smartkv.decode_step import Step, step_by_kernels
from kvcompile.schemes import Smartkv, Stored
from kvcompile.schemes.smartkv.buckets import PLANES
from kvcompile.types import PAGE, Role, SlotSpec

SLOTS = (SlotSpec(K, D, torch.bfloat16, Role.KEY), SlotSpec(K, D, torch.bfloat16, Role.VALUE))


def stored(scheme: Smartkv, batch: int, tokens: int) -> Stored:
    """A layer's planes whose tokens have all just entered."""
    halves = []
    for slot in SLOTS:
        own = scheme.of(slot.role)
        empty = tuple(torch.zeros(plane.shape(0, batch, K), dtype=plane.dtype, device="cuda") for plane in own.layout(slot).planes)
        made = own.with_room(empty, 0, tokens)
        made[0].random_(0, 256)
        made[1].uniform_(0.005, 0.02)
        halves.append(made)
    importance = halves[0][PLANES]
    importance[: tokens // PAGE, :, 0, :, :2] = (torch.rand(tokens // PAGE, batch, PAGE, 1, device="cuda") ** 8).expand(-1, -1, -1, 2)
    return Stored(halves[0], halves[1], SLOTS, 0, 0)


@contextlib.contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Add the milliseconds until all of the body is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    yield
    torch.cuda.synchronize()
    into.append((time.perf_counter() - begin) * 1e3)


def measure(scheme: Smartkv, batch: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of one layer's attention and of its widths' decision, and what it holds."""
    decided, moved = list[float](), list[float]()
    own = scheme.of(Role.KEY)
    for _ in range(4):
        # Those that have just entered, each time.
        layer = stored(scheme, batch, tokens)
        with timed(decided):
            decision = own.decide([layer], own.importance([layer.keys], tokens, [layer.keys]))
        with timed(moved):
            made = own.move(layer, decision, 0, tokens)
    # Room for the next token.
    pairs = zip((made.keys, made.values), SLOTS, strict=True)
    planes = [list(scheme.of(slot.role).with_room(half, tokens, tokens + 1)) for half, slot in pairs]
    count = PLANES
    keys, (importance, heads, _) = planes[0][:count], planes[0][count:]
    q = torch.randn(batch, H, 1, D, device="cuda", dtype=torch.bfloat16)
    hi = torch.full((1, 1), tokens - 1, device="cuda")
    texts = [scheme.of(role).spell() for role in (Role.KEY, Role.VALUE)]
    step = Step(AttendOperands(q, keys, planes[1], hi, None, None, None, None, *texts, D**-0.5, 0.0, D), importance, heads)
    error = _error(step)
    if not error < 1e-2:
        raise SystemExit(f"B={batch} T={tokens} is wrong: relative error {error:.3g}; no times")
    held = sum(plane.nbytes for half in planes for plane in half)
    from torch.nn.attention import SDPBackend

    return {
        "batch": batch, "tokens": tokens, "ms": graph_ms(lambda: step_by_kernels(Direct(cuda=True), step)),
        "cudnn_ms": sdpa_ms(batch, tokens, SDPBackend.CUDNN_ATTENTION), "flash_ms": sdpa_ms(batch, tokens, SDPBackend.FLASH_ATTENTION),
        "bytes": held / (4 * batch * tokens * K * D), "decide_ms": statistics.median(decided[1:]), "move_ms": statistics.median(moved[1:]),
    }


def _error(step: Step) -> float:
    """The distance of the kernels' result from the definition's, over its norm."""
    copies = [Step(step.attend, step.importance.clone(), step.heads.clone()) for _ in range(2)]
    found, exact = step_by_kernels(Direct(cuda=True), copies[0]).float(), attend_by_definition(copies[1]).float()
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x131072,1x32768,8x32768,1x4096")
    parser.add_argument("--scheme", type=schemes.parse, default="smartkv")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for shape in given.shapes.split(","):
        batch, tokens = map(int, shape.split("x"))
        rows.append(measure(given.scheme, batch, tokens))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
