"""Milliseconds of every decode step around smartkv's reallocations, of a Llama-3.1-8B-shaped model with random weights, on a GPU.

    python benchmarks/extensions/smartkv/smartkv_reallocation.py [--scheme 'smartkv(tau=1e-6)'] [--context 32768] [--mode reduce-overhead]

The cache begins filled with random tokens, as ``step.py --prompt filled``. The device is waited for after every step, so a step's time has
what runs beside it too. With ``tau=1e-6`` importance drifts at every look, so widths are decided every 32 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import kvcompile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from step import build, filled


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="smartkv(tau=1e-6)")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--mode", default="reduce-overhead", choices=["default", "reduce-overhead"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=70)
    given = parser.parse_args()
    model, config = build(given.layers)
    cache = filled(config, 1, given.context, given.context + 1024)
    owner = kvcompile.backend(given.scheme, strict=True)
    call = torch.compile(model, backend=owner, mode=None if given.mode == "default" else given.mode, fullgraph=True)
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    steps = []
    with torch.no_grad():
        for _ in range(given.steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.compiler.cudagraph_mark_step_begin()
            call(token, past_key_values=cache, use_cache=True)
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - begin) * 1e3)
    report = owner.report()
    slowest = sorted(range(6, given.steps), key=lambda number: -steps[number])[:6]
    print(json.dumps({
        "scheme": given.scheme, "context": given.context, "mode": given.mode, "device": torch.cuda.get_device_name(),
        "compile_s": round(steps[0] / 1e3, 1), "median_ms": round(statistics.median(steps[8:]), 2),
        "slowest_ms": {number: round(steps[number], 1) for number in slowest}, "allocated_GB": round(report.allocated / 1e9, 3),
        "announced_GB": round(report.announced / 1e9, 3), "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }))


if __name__ == "__main__":
    main()
