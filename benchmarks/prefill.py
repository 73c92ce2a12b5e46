"""Compiled prefill: ms and peak memory above the weights, stock torch.compile against kvcompile, with and without padding.

Llama-3.1-8B-shaped layers with random weights; one prompt into an empty dynamic cache, logits of the last
token only. Compile once, then the median of the timed calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from step import build, clear

import kvcompile


@dataclass
class Row:
    """One measured prefill; ms, and GB above what the weights hold."""

    name: str
    tokens: int
    padded: bool
    ms: float
    peak_gb: float
    cache_gb: float


def measure(model: Any, config: Any, name: str, tokens: int, padded: bool, repeats: int) -> Row:
    """One configuration: ``stock`` or a scheme."""
    clear()
    owner = None if name == "stock" else kvcompile.backend(name, strict=True)
    call = torch.compile(model, fullgraph=True) if owner is None else torch.compile(model, backend=owner, fullgraph=True)
    prompt = torch.randint(0, 1000, (1, tokens), device="cuda")
    keep = torch.ones(1, tokens, dtype=torch.long, device="cuda")
    if padded:
        keep[:, : tokens // 8] = 0
    base = torch.cuda.memory_allocated()
    samples, peak, held = [], 0, 0
    for index in range(repeats + 1):
        cache = transformers.DynamicCache(config=config)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with torch.no_grad():
            call(prompt, past_key_values=cache, attention_mask=keep if padded else None, logits_to_keep=1)
        torch.cuda.synchronize()
        if index:
            samples.append((time.perf_counter() - begin) * 1e3)
            peak = max(peak, torch.cuda.max_memory_allocated() - base)
        held = owner.report().allocated if owner is not None else sum(
            layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
        )
        del cache
    return Row(name, tokens, padded, statistics.median(samples), peak / 1e9, held / 1e9)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; ``--json`` keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--configurations", default="stock,int4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    model, config = build(options.layers)
    rows = []
    console = Console(width=130)
    for padded in (False, True):
        for tokens in (int(part) for part in options.tokens.split(",")):
            for name in options.configurations.split(","):
                try:
                    rows.append(measure(model, config, name, tokens, padded, options.repeats))
                    console.print(rows[-1])
                except Exception as error:
                    console.print(f"{name} {tokens} padded={padded} failed: {type(error).__name__}: {str(error)[:300]}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table(title=f"prefill, {options.layers} layers of Llama-3.1-8B shape, batch 1, {machine}")
    for title in ("tokens", "padding", "configuration", "ms", "peak GB", "cache GB"):
        table.add_column(title, justify="right")
    for row in rows:
        padding = "left 1/8" if row.padded else "none"
        table.add_row(f"{row.tokens:,}", padding, row.name, f"{row.ms:.1f}", f"{row.peak_gb:.2f}", f"{row.cache_gb:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
