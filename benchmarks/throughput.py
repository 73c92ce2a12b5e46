"""How many sequences a card holds and how many tokens a second it makes: stock Hugging Face eager against schemes.

    python benchmarks/throughput.py [--configurations stock kivi ...] [--batch N ...] [--cap 80] [--json FILE] [--turns FILE]

Llama-2-7B shape (32 layers, 32 kv heads of 128), random float16 weights, prompts of 160 tokens and 338 new tokens each
(the ShareGPT means that KIVI and SQuat measure with). For every configuration the batch is raised until the allocator's
cap in GB is reached; what is reported is the largest batch that ran: tokens a second over prefill and decoding, and
the peak of allocated memory. Every configuration also runs at the largest batch of the first one, so that memory
is compared at one and the same work. Tokens are fixed, so that every configuration does the same work. ``--batch`` measures just
these batches and searches nothing, since each is compiled anew; ``squat+fold`` compiles equal layers once. ``--turns``:
processes of one configuration each compile side by side, and take turns on the device by a lock on FILE while they are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from turns import turn

import kvcompile

PROMPT, NEW = 160, 338


@dataclass
class Run:
    """One finished generation; memory in GB of allocated bytes."""

    name: str
    batch: int
    tokens_per_s: float
    prefill_s: float
    decode_ms: float
    peak_gb: float
    cache_gb: float


def build(layers: int, hidden: int, device: str) -> tuple[Any, Any]:
    """The model with random weights, made on the device."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_hidden_layers=layers, num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128, vocab_size=32000, max_position_embeddings=4096,
    )
    with torch.device(device):
        torch.set_default_dtype(torch.float16)
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    return model, config


def generate(model: Any, config: Any, name: str, batch: int, new: int, device: str, turns: Path | None = None) -> Run:
    """Prefill and ``new`` steps; raises what the allocator raises."""
    torch._dynamo.reset()
    owner = None
    call = model
    if name != "stock":
        scheme, _, fold = name.partition("+")
        owner = kvcompile.backend(scheme, strict=True, fold=bool(fold))
        call = torch.compile(model, backend=owner)
    ids = torch.randint(0, 32000, (batch, PROMPT), device=device)
    token = ids[:, :1]

    @torch.no_grad()
    def run(steps: int) -> tuple[float, float]:
        _sync(device)
        begin = time.perf_counter()
        cache = transformers.DynamicCache(config=config)
        call(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        _sync(device)
        middle = time.perf_counter()
        for _ in range(steps):
            call(token, past_key_values=cache, use_cache=True)
        _sync(device)
        held.append(owner.report().allocated if owner is not None else _dense_bytes(config, batch, PROMPT + steps))
        return middle - begin, time.perf_counter() - middle

    held: list[int] = []
    # Whatever is compiled or tuned is so before the clock runs.
    run(4 if owner is not None else 1)
    with turn(turns):
        _collect(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        prefill, decode = run(new)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Run(name, batch, batch * new / (prefill + decode), prefill, decode / new * 1e3, peak / 1e9, held[-1] / 1e9)


def _dense_bytes(config: Any, batch: int, tokens: int) -> int:
    return 2 * 2 * batch * tokens * config.num_hidden_layers * config.hidden_size


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _collect(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def largest(model: Any, config: Any, name: str, cap: float, new: int, device: str, say: Any) -> Run | None:
    """The largest batch, to about 6%, that stays below the cap: first as many as the bytes of a short run promise, then fewer."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    probe = generate(model, config, name, 16, 8, device)
    # A sequence's bytes: its cache at the end, and the activations of its prompt (a residual stream and an MLP's two halves).
    per = probe.cache_gb / 16 * _growth(name, new) + PROMPT * config.hidden_size * 2 * 12e-9
    batch = int((cap - weights / 1e9) / per) // 16 * 16
    while batch >= 16:
        try:
            return generate(model, config, name, batch, new, device)
        except torch.cuda.OutOfMemoryError:
            say(f"{name}: {batch} sequences do not fit")
            batch = int(batch * 0.94) // 16 * 16
            _collect(device)
    return None


def _growth(name: str, new: int) -> float:
    """How much larger a cache is at the end than after 8 new tokens, at most."""
    return (PROMPT + new) / (PROMPT + 8) if name == "stock" else max(1.0, -(-(PROMPT + new) // 64) / -(-(PROMPT + 8) // 64))


def table(runs: list[Run]) -> Table:
    """The runs for people, against the first one's largest batch."""
    result = Table(title=f"Llama-2-7B shape, {PROMPT} + {NEW} tokens a sequence", header_style="bold")
    for title in ("configuration", "batch", "tokens/s", "x stock", "decode ms", "peak GB", "x less", "cache GB"):
        result.add_column(title, justify="left" if title == "configuration" else "right")
    first = runs[0]
    for run in runs:
        same = f"{first.peak_gb / run.peak_gb:.2f}" if run.batch == first.batch and run.peak_gb else ""
        result.add_row(
            run.name, str(run.batch), f"{run.tokens_per_s:,.0f}", f"{run.tokens_per_s / first.tokens_per_s:.2f}", f"{run.decode_ms:.1f}",
            f"{run.peak_gb:.1f}", same, f"{run.cache_gb:.1f}",
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure and print; ``--json`` keeps the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", nargs="+", default=["stock", "kivi", "kivi(window=128)"])
    parser.add_argument("--cap", type=float, default=80.0, help="GB that the allocator may take")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", help="measure these batches, without a search")
    parser.add_argument("--turns", type=Path, help="a file by whose lock processes take turns on the device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    console = Console(width=140)
    if options.device == "cuda":
        console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
        torch.cuda.set_per_process_memory_fraction(options.cap * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    model, config = build(options.layers, options.hidden, options.device)
    runs: list[Run] = []
    for name in options.configurations:
        if options.batch:
            made = [generate(model, config, name, batch, options.new, options.device, options.turns) for batch in options.batch]
        else:
            found = largest(model, config, name, options.cap, options.new, options.device, console.print)
            made = [found] if found is not None else []
            if found is not None and runs and found.batch != runs[0].batch:
                made.insert(0, generate(model, config, name, runs[0].batch, options.new, options.device))
        for run in made:
            console.print(run)
        runs += made
        if options.json:
            options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))
        _collect(options.device)
    if not runs:
        console.print(f"{options.cap} GB hold no batch of 16")
        return 1
    console.print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
