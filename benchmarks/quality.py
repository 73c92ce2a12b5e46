"""What 2-bit schemes do to a model's answers, after Table 1 and the ablation (Table 3) of "SQuat": tinylm through the compiled cache.

    python benchmarks/quality.py [--part schemes|lam|blocks] [--context N] [--questions N] [--inner eager|inductor] [--json FILE]

schemes: the schemes beside each other; lam: squat over lam and the number of directions, normalised, and the source's own form;
blocks: over the channels that are quantized at a time. Every figure is measured as ``kvcompile eval`` measures it: the prompt is
prefilled into an empty cache, then single tokens are decoded from what the cache holds, beside the uncompressed model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from kvcompile.tools.cli.subjects import tinylm
from kvcompile.tools.evaluation.bench import Bench, Effort, labels
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.measures import Measured
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.tables import summary_table

PARTS: dict[str, tuple[str, ...]] = {
    "schemes": ("dense", "int4", "kivi(bits=4)", "kivi", "squat", "squat(lam=0.001,rank=5,normalise=False)"),
    "lam": (
        "kivi",
        *(f"squat(lam={lam},rank={rank},subblock=16)" for rank in (5, 20, 60) for lam in (0.1, 1, 10)),
        *(f"squat(lam={lam},rank=5,subblock=16,normalise=False)" for lam in (1e-4, 1e-3, 1e-2, 1e-1)),
    ),
    "blocks": ("kivi", *(f"squat(subblock={block},rank={rank})" for rank in (20, 60) for block in (32, 16, 8))),
}


def main() -> int:
    """Measure and print; the JSON file is written after every scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="schemes")
    parser.add_argument("--schemes", help="others than the part's, with semicolons between them")
    parser.add_argument("--context", type=int, default=2000, help="bytes of a prompt")
    parser.add_argument("--tail", type=int, default=128, help="bytes decoded of each text")
    parser.add_argument("--questions", type=int, default=96, help="a task")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    effort = Effort((arguments.context,), arguments.tail, arguments.questions, inner=arguments.inner, attention=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench, rows = Bench(tinylm(device), effort), list[Measured]()
    progress = Console(stderr=True)
    names = arguments.schemes.split(";") if arguments.schemes else PARTS[arguments.part]
    settings = {"model": "tinylm", "dtype": bench.subject.dtype, "unit": "bytes", **dataclasses.asdict(effort)}
    results = Results(settings, machine(device), bench.reference(), ())
    for scheme, label in labels(names):
        rows.append(bench.measure(scheme, label))
        row, results = rows[-1], dataclasses.replace(results, schemes=tuple(rows))
        progress.print(f"{label}: {row.bits_per_byte:.3f} bits per byte, multi-key {row.share('multikey').value:.0%}, {row.seconds:.0f} s")
        if arguments.json:
            arguments.json.write_text(json.dumps(results.plain(), indent=1) + "\n")
    Console(width=150).print(summary_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
