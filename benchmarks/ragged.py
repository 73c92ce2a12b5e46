"""One new token in batches whose rows differ in length: the same tokens in rows of one length and in rows of very different ones.

    python benchmarks/ragged.py [--json FILE] [--schemes int8,int4]

H=32 query heads, K=8 kv heads, D=128, bfloat16; medians over CUDA-graph replays. "Balanced": rows share programs by their lengths
(``tiles.ragged_splits``), as compiled graphs have it; "by row": every row is cut into the same number of programs. Correctness first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention import BANDWIDTH, Asked, D, H, graph_ms, relative_error, store
from benchmarks.graphs import compiled
from kvcompile import schemes
from kvcompile.lowering.decode import lower as triton_attend
from kvcompile.lowering.decode.config import AttendConfig
from kvcompile.types import Role

LENGTHS = {
    "16 x 8,192": [8192] * 16,
    "65,536 + 15 x 4,368": [65536] + [4368] * 15,
    "8 x 12,288 + 8 x 4,096": [12288] * 8 + [4096] * 8,
    "geometric, 32,768 to 1,024": [int(32768 * 2 ** (-i / 3)) for i in range(16)],
}


def attention(planes: list[list[torch.Tensor]], q: torch.Tensor, hi: torch.Tensor, spell: str, balanced: bool) -> Callable[[], Any]:
    """One layer's attention, as the backend compiles it."""
    half = len(planes[0])

    def attend(q: torch.Tensor, hi: torch.Tensor, *stores: torch.Tensor) -> list[torch.Tensor]:
        keys, values = list(stores[:half]), list(stores[half:])
        return [torch.ops.kvcompile.attend(q, keys, values, hi, None, None, None, None, spell, spell, D**-0.5, 0.0, D)]

    arguments = [q, hi, *planes[0], *planes[1]]
    real, taken = triton_attend.ragged_splits, []

    def chosen(config: AttendConfig, splits: int, batch: int) -> tuple[int, int]:
        taken.append(real(config, splits, batch) if balanced else (splits, 0))
        return taken[-1]

    triton_attend.ragged_splits = chosen
    try:
        run = compiled(attend, arguments)
    finally:
        triton_attend.ragged_splits = real
    print(f"{spell}: splits and shares {taken}", flush=True)
    return lambda: run(*arguments)[0]


def measure(scheme: str) -> list[dict[str, Any]]:
    """A row for each set of lengths."""
    spell, longest = schemes.parse(scheme).spec(), max(max(lengths) for lengths in LENGTHS.values())
    planes = [store(scheme, 16, longest, role) for role in Role]
    token = sum(plane.nbytes for plane in (*planes[0], *planes[1])) / 16 / longest
    q = torch.randn(16, H, 1, D, device="cuda", dtype=torch.bfloat16)
    calls = {}
    rows = []
    hi = torch.empty(16, 1, dtype=torch.int64, device="cuda")
    for balanced in (False, True):
        calls[balanced] = attention(planes, q, hi.fill_(longest - 1), spell, balanced)
    for name, lengths in LENGTHS.items():
        hi.copy_(torch.tensor(lengths, device="cuda").unsqueeze(1) - 1)
        found = {}
        for balanced, call in calls.items():
            for row in (0, 15):
                kept = [[plane[:, row : row + 1] for plane in slot] for slot in planes]
                error = relative_error(call()[row : row + 1], Asked(scheme, spell, q[row : row + 1], *kept, hi[row : row + 1]))
                if not error < 1e-2:
                    raise SystemExit(f"{scheme}, {name}, row {row} is wrong: relative error {error:.3g}; no times")
            found[balanced] = graph_ms(call)
        roof = token * sum(lengths) / BANDWIDTH * 1e3
        rows.append({
            "scheme": scheme, "lengths": name, "tokens": sum(lengths), "balanced_ms": found[True], "by_row_ms": found[False],
            "roof_ms": roof,
        })
        print(f"{scheme} {name}: {found[True]:.4f} ms balanced, {found[False]:.4f} by row, roof {roof:.4f}", flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--schemes", default="int8,int4")
    options = parser.parse_args()
    rows = [row for scheme in options.schemes.split(",") for row in measure(scheme)]
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
