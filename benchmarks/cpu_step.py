"""One decode step of tinylm on the CPU at a long context: stock torch.compile on a static cache against kvcompile.

Both run through Inductor's C++ path; the stock step attends over the capacity, ours over the length in
use. Correctness gate: ``dense`` must give stock's logits to 1e-3 before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import kvcompile

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tinylm"


def prepared(model: Any, ids: torch.Tensor, capacity: int) -> Any:
    """A static cache that holds the prompt."""
    cache = transformers.StaticCache(model.config, max_cache_len=capacity)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def main(argv: list[str] | None = None) -> int:
    """Measure and print; ``--json`` keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=4352)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--configurations", default="stock,dense,int8,int4,fp8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    model = transformers.LlamaForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, options.dtype)).eval()
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (options.batch, options.context))
    token = torch.randint(0, 256, (options.batch, 1))
    rows: list[dict[str, Any]] = []
    logits = {}
    for name in options.configurations.split(","):
        torch._dynamo.reset()
        owner = None if name == "stock" else kvcompile.backend(name, strict=True)
        call = torch.compile(model, fullgraph=True) if owner is None else torch.compile(model, backend=owner, fullgraph=True)
        cache = prepared(model, ids, options.capacity)
        with torch.no_grad():
            logits[name] = call(token, past_key_values=cache).logits.float()
            for _ in range(4):
                call(token, past_key_values=cache)
            samples = []
            for _ in range(options.steps):
                begin = time.perf_counter()
                call(token, past_key_values=cache)
                samples.append((time.perf_counter() - begin) * 1e3)
        dense = sum(layer.keys.nbytes + layer.values.nbytes for layer in prepared(model, ids[:, :1], options.capacity).layers)
        rows.append({
            "name": name, "ms": statistics.median(samples), "least_ms": min(samples),
            "cache_mb": (owner.report().allocated if owner is not None else dense) / 1e6,
        })
    if "dense" in logits and "stock" in logits:
        error = ((logits["dense"] - logits["stock"]).norm() / logits["stock"].norm()).item()
        if not error < (1e-3 if options.dtype == "float32" else 3e-2):
            print(f"gate failed: dense differs from stock by {error}")
            return 1
    console = Console(width=110)
    table = Table(title=(
        f"tinylm, one step at {options.context} tokens of capacity {options.capacity}, batch {options.batch}, {options.dtype}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.processor() or platform.machine()}"
    ))
    for title in ("configuration", "ms (median)", "ms (least)", "x stock", "cache MB"):
        table.add_column(title, justify="right")
    for row in rows:
        ratio = row["ms"] / rows[0]["ms"]
        table.add_row(row["name"], f"{row['ms']:.2f}", f"{row['least_ms']:.2f}", f"{ratio:.2f}", f"{row['cache_mb']:.1f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
