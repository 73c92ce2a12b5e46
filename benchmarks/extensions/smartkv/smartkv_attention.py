"""Time of smartkv's attention, one new token, beside int4, int8 and SDPA over bfloat16, what importance costs of it, and a reallocation.

    python benchmarks/extensions/smartkv/smartkv_attention.py [--budgets 0.281,0.4] [--shapes 1x32768,1x131072] [--entered 64]
            [--programs 1024] [--json FILE]

H=32 query heads, K=8 kv heads, D=128, bfloat16; medians over CUDA-graph replays. Importance is random to the eighth power, so a few tokens
have most of it; codes are random. ``--entered``: tokens that came since the reallocation. Correctness first: the kernels against the
definition. A failing case does not end the run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from benchmarks.attention import D, H, K, attend_call, graph_ms, sdpa_ms
from kvcompile import schemes
from kvcompile.extensions.smartkv import decode_step
from kvcompile.extensions.smartkv.attend import attend_by_definition
from kvcompile.extensions.smartkv.decode_step import DecodeStepOperands, step_by_kernels
from kvcompile.lowering.host.launches import Direct
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes import Smartkv, StoredLayer
from kvcompile.types import PAGE, Role, SlotSpec

SLOTS = (SlotSpec(K, D, torch.bfloat16, Role.KEY), SlotSpec(K, D, torch.bfloat16, Role.VALUE))
DEVICE = Direct(cuda=True)


def stored(scheme: Smartkv, batch: int, tokens: int) -> StoredLayer:
    """A layer's planes whose tokens have all just entered."""
    halves = []
    for slot in SLOTS:
        own = scheme.for_role(slot.role)
        empty = tuple(torch.zeros(plane.shape(0, batch, K), dtype=plane.dtype, device="cuda") for plane in own.layout(slot).planes)
        made = own.with_room(empty, 0, tokens)
        made[0].random_(0, 256)
        made[1].uniform_(0.005, 0.02)
        halves.append(made)
    importance = halves[0][scheme.for_role(Role.KEY).planes_read(SLOTS[0])]
    importance[: tokens // PAGE, :, 0] = (torch.rand(tokens // PAGE, batch, PAGE, 1, device="cuda") ** 8).expand(-1, -1, -1, 2)
    return StoredLayer(halves[0], halves[1], SLOTS, 0, 0)


@contextlib.contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Add the milliseconds until all of the body is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    yield
    torch.cuda.synchronize()
    into.append((time.perf_counter() - begin) * 1e3)


def step_of(scheme: Smartkv, batch: int, tokens: int, entered: int) -> tuple[DecodeStepOperands, dict[str, Any]]:
    """A step over ``tokens`` tokens of which the last ones ``entered`` lately; bytes, levels, and milliseconds of the reallocation."""
    decided, moved = list[float](), list[float]()
    own, count = scheme.for_role(Role.KEY), tokens - entered
    for _ in range(3):
        # Those that have just entered, each time.
        layer = stored(scheme, batch, count)
        with timed(decided):
            decision = own.decide([layer], own.importance([layer.keys], count, [layer.keys]))
        with timed(moved):
            made = own.move(layer, decision, 0, count)
    pairs = zip((made.keys, made.values), SLOTS, strict=True)
    planes = [list(scheme.for_role(slot.role).with_room(half, count, tokens)) for half, slot in pairs]
    for half in planes:
        half[0].random_(0, 256)
        half[1].uniform_(0.005, 0.02)
    read = own.planes_read(SLOTS[0])
    importance, _, heads, _ = planes[0][read:]
    q = torch.randn(batch, H, 1, D, device="cuda", dtype=torch.bfloat16)
    hi = torch.full((1, 1), tokens - 1, device="cuda")
    texts = [scheme.for_role(role).spec() for role in (Role.KEY, Role.VALUE)]
    attend = AttendOperands(q, planes[0][:read], planes[1], hi, None, None, None, None, *texts, D**-0.5, 0.0, D)
    step = DecodeStepOperands(attend, importance, heads)
    ends = planes[0][3][0, 0, 0, 0, : len(own.levels)].tolist()
    return step, {
        "bytes": round(sum(plane.nbytes for half in planes for plane in half) / (4 * batch * tokens * K * D), 4),
        "levels": {f"{k}/{v}": end - start for k, v, start, end in zip(own.levels.keys, own.levels.values, [0, *ends], ends, strict=False)},
        "decide_ms": round(statistics.median(decided), 2), "move_ms": round(statistics.median(moved), 2),
    }


def apart(step: DecodeStepOperands) -> dict[str, float]:
    """The distance of result and importance of the kernels from the definition's, over their norms."""
    copies = [DecodeStepOperands(step.attend, step.importance.clone(), step.heads.clone()) for _ in range(2)]
    found, exact = step_by_kernels(DEVICE, copies[0]).float(), attend_by_definition(copies[1]).float()
    pairs = {name: [getattr(each, name) for each in copies] for name in ("importance", "heads")} | {"result": [found, exact]}
    return {name: float((mine - wanted).norm() / wanted.norm()) for name, (mine, wanted) in pairs.items()}


def measure(scheme: Smartkv, batch: int, tokens: int, entered: int) -> dict[str, Any]:
    """Milliseconds of one layer's attention, with and without importance, and what it holds."""
    step, found = step_of(scheme, batch, tokens, entered)
    errors = apart(step)
    if not (errors["result"] < 1e-2 and errors["importance"] < 2e-2 and errors["heads"] < 1e-2):
        return {"wrong": errors, **found}
    alone = graph_ms(lambda: step_by_kernels(DEVICE, step, tells=False))
    whole = graph_ms(lambda: step_by_kernels(DEVICE, step))
    return {"ms": round(whole, 4), "without_importance_ms": round(alone, 4), "importance_costs": round(whole / alone - 1, 3), **found, **{
        f"error_{name}": float(f"{value:.2g}") for name, value in errors.items()
    }}


def main() -> None:
    """Print a line for each shape and scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x32768,1x131072,8x32768,1x4096")
    parser.add_argument("--budgets", default="0.281,0.4")
    parser.add_argument("--options", default="", help="further options of the scheme, as frame=source")
    parser.add_argument("--entered", type=int, default=64)
    parser.add_argument("--programs", default="1024", help="programs of a launch, several separated by commas")
    parser.add_argument("--others", default="int4,int8")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    from torch.nn.attention import SDPBackend

    rows = []
    for shape in given.shapes.split(","):
        batch, tokens = map(int, shape.split("x"))
        for budget, programs in itertools.product(given.budgets.split(","), map(int, given.programs.split(","))):
            decode_step.PROGRAMS, decode_step.SPLITS = programs, programs // K
            text = f"smartkv({','.join(filter(None, (f'budget={budget}', given.options)))})"
            row = {"scheme": text, "shape": shape, "programs": programs}
            try:
                scheme = schemes.parse(text)
                assert isinstance(scheme, Smartkv)
                row |= measure(scheme, batch, tokens, given.entered)
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                row["failed"] = f"{type(error).__name__}: {str(error)[:400]}"
            rows.append(row)
            print(json.dumps(row), flush=True)
        for name in filter(None, given.others.split(",")):
            try:
                rows.append({"scheme": name, "shape": shape, "ms": round(graph_ms(attend_call(name, batch, tokens, None)[0]), 4)})
            except Exception as error:  # noqa: BLE001 - as above
                rows.append({"scheme": name, "shape": shape, "failed": f"{type(error).__name__}: {str(error)[:400]}"})
            print(json.dumps(rows[-1]), flush=True)
        rows.append({"scheme": "SDPA cuDNN, bfloat16", "shape": shape, "ms": sdpa_ms(batch, tokens, SDPBackend.CUDNN_ATTENTION)})
        print(json.dumps(rows[-1]), flush=True)
    print("\n".join(f"{row['shape']:>10} {row['scheme']:<34} {row.get('ms', 'failed')}" for row in rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
