"""How many sequences a card holds and how many tokens a second it makes: stock Hugging Face eager against schemes.

    python benchmarks/throughput.py [--shape llama-2-7b] [--configurations stock kivi squat+fold ...] [--cap 80] [--json FILE]
                                    [--batch N ... full] [--sampled] [--limit SECONDS] [--turns FILE]

32 layers of Llama-2-7B (32 kv heads of 128) or of Llama-3.1-8B (8 kv heads), random float16 weights, prompts of 160 tokens and 338 new
tokens each (the ShareGPT means that KIVI and SQuat measure with). For every configuration the batch is raised until the allocator's
cap in GB is reached; what is reported is the largest batch that ran: tokens a second over prefill and decoding, and
the peak of allocated memory. Every configuration also runs at the largest batch of the first one, so that memory
is compared at one and the same work. Tokens are fixed, so that every configuration does the same work. ``--batch`` measures just
these batches and searches nothing; ``full`` is the most that the cap holds by the bytes of the batch before it. ``squat+fold`` compiles
equal layers once.

``--sampled``: stock's steps are timed at three lengths, over caches of random keys and values, in place of all 338; its tokens a second
are of their mean. ``--limit``: no batch is begun behind so many seconds. ``--turns``: processes of one configuration each compile side by
side, and take turns on the device by a lock on FILE while they are timed. The short form, two processes on one card of 141 GB:

    for c in stock squat+fold; do
        python benchmarks/throughput.py --shape llama-3.1-8b --configurations $c --batch 240 full --sampled --limit 70 --turns FILE &
    done; wait
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
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
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {"kv": 32, "inner": 11008, "words": 32000},
    "llama-3.1-8b": {"kv": 8, "inner": 14336, "words": 128256},
}
"""Kv heads, width of the MLP and vocabulary of models with 32 layers of 32 heads; narrower ones keep the ratios."""
SAMPLES = 16
"""Steps that are timed at each of three lengths."""
WARM = 4
"""Steps before those that are timed."""
FULL, ROOM = "full", 0.97
"""The word for a batch that fills the cap, and the share of its prediction that is tried: what fragments is lost."""


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
    sampled: bool = False


def build(shape: str, layers: int, hidden: int, device: str) -> tuple[Any, Any]:
    """The model with random weights, made on the device."""
    facts, heads = SHAPES[shape], hidden // 128
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=facts["inner"] * hidden // 4096, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, facts["kv"] * heads // 32), vocab_size=facts["words"], max_position_embeddings=4096, head_dim=128,
    )
    with torch.device(device):
        torch.set_default_dtype(torch.float16)
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    return model, config


class Generation:
    """One configuration of the model, stock or compiled, at any number of batches."""

    def __init__(self, model: Any, config: Any, name: str, device: str, sampled: bool = False) -> None:
        torch._dynamo.reset()
        self.config, self.name, self.device, self.sampled = config, name, device, sampled and name == "stock"
        self.owner, self.call, self.begun = None, model, False
        if name != "stock":
            scheme, _, fold = name.partition("+")
            self.owner = kvcompile.backend(scheme, strict=True, fold=bool(fold))
            self.call = torch.compile(model, backend=self.owner)

    @torch.no_grad()
    def prefill(self, batch: int) -> tuple[Any, float]:
        """A cache of the prompts, and seconds."""
        ids = torch.randint(0, self.config.vocab_size, (batch, PROMPT), device=self.device)
        # Another batch then needs no other graph of the prompt.
        torch._dynamo.maybe_mark_dynamic(ids, 0)
        cache = transformers.DynamicCache(config=self.config)
        return cache, self._seconds(lambda: self.call(ids, past_key_values=cache, use_cache=True, logits_to_keep=1))

    def steps(self, cache: Any, batch: int, count: int) -> float:
        """Decode ``count`` tokens behind what a cache holds; seconds."""
        token = torch.ones(batch, 1, dtype=torch.int64, device=self.device)

        @torch.no_grad()
        def run() -> None:
            for _ in range(count):
                self.call(token, past_key_values=cache, use_cache=True)

        return self._seconds(run)

    def _seconds(self, call: Any) -> float:
        _sync(self.device)
        begin = time.perf_counter()
        call()
        _sync(self.device)
        return time.perf_counter() - begin

    def filled(self, batch: int, tokens: int) -> Any:
        """A stock cache of random keys and values."""
        cache = transformers.DynamicCache(config=self.config)
        shape = batch, self.config.num_key_value_heads, tokens, self.config.head_dim
        for layer in range(self.config.num_hidden_layers):
            cache.update(*(torch.randn(shape, dtype=torch.float16, device=self.device) for _ in range(2)), layer)
        return cache

    def decoded(self, batch: int, new: int) -> tuple[float, float, int]:
        """Seconds of the prompt and of ``new`` steps, and bytes of the cache at the end; the first steps may compile, and are not timed."""
        graphs = self.graphs()
        cache, prefill = self.prefill(batch)
        if self.graphs() > graphs:
            del cache
            cache, prefill = self.prefill(batch)
        if not self.sampled:
            warm = min(WARM, new - 1)
            self.steps(cache, batch, warm)
            decode = self.steps(cache, batch, new - warm) * new / (new - warm)
            held = self.owner.report().allocated if self.owner is not None else self.dense_bytes(batch, PROMPT + new)
            return prefill, decode, held
        count, found = min(SAMPLES, new), []
        for length in (PROMPT, PROMPT + (new - count) // 2, PROMPT + new - count):
            cache = None
            _collect(self.device)
            cache = self.filled(batch, length)
            self.steps(cache, batch, 1)
            found.append(self.steps(cache, batch, count - 1) / max(1, count - 1))
        return prefill, new * sum(found) / len(found), self.dense_bytes(batch, PROMPT + new)

    def graphs(self) -> int:
        """Graphs that were compiled so far."""
        return len(self.owner.report().graphs) if self.owner is not None else 0

    def dense_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of a dense cache."""
        return 2 * 2 * batch * tokens * self.config.num_hidden_layers * self.config.num_key_value_heads * self.config.head_dim

    def __call__(self, batch: int, new: int, turns: Path | None = None) -> Run:
        """Prefill and ``new`` steps; raises what the allocator raises."""
        if not self.begun:
            # Whatever is compiled or tuned for the first batch is so before the clock runs, beside other processes.
            self.begun = True
            cache, _ = self.prefill(batch)
            self.steps(cache, batch, WARM)
            del cache
        with turn(turns):
            _collect(self.device)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            prefill, decode, held = self.decoded(batch, new)
            peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
            _collect(self.device)
        return Run(self.name, batch, batch * new / (prefill + decode), prefill, decode / new * 1e3, peak / 1e9, held / 1e9, self.sampled)


def listed(
    generation: Generation, weights: float, options: argparse.Namespace, begun: float, say: Callable[[object], None]
) -> Iterator[Run]:
    """Run the batches of ``--batch``, one after the other, as long as the clock allows; ``full`` is tried with fewer where it fails."""
    last: Run | None = None
    for item in options.batch:
        batch, least = (full(last, weights, options.cap), 16) if item == FULL else (int(item), 1)
        while batch >= least and time.perf_counter() - begun < options.limit:
            try:
                last = generation(batch, options.new, options.turns)
            except torch.cuda.OutOfMemoryError:
                say(f"{generation.name}: {batch} sequences do not fit")
                batch = int(batch * 0.94) // 16 * 16 if item == FULL else 0
                _collect(generation.device)
                continue
            yield last
            break


def full(last: Run | None, weights: float, cap: float) -> int:
    """How many sequences the cap holds, by the bytes of a run before; 0 where there was none or memory was not counted."""
    if last is None or last.peak_gb <= weights:
        return 0
    return int((cap - weights) * ROOM * last.batch / (last.peak_gb - weights)) // 16 * 16


def weights_gb(model: Any) -> float:
    """GB of a model's parameters."""
    return float(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e9)


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _collect(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def largest(model: Any, config: Any, name: str, cap: float, new: int, device: str, say: Any) -> Run | None:
    """The largest batch, to about 6%, that stays below the cap: first as many as the bytes of a short run promise, then fewer."""
    weights = weights_gb(model)
    probe = Generation(model, config, name, device)(16, 8)
    # A sequence's bytes: its cache at the end, and the activations of its prompt (a residual stream and an MLP's two halves).
    per = probe.cache_gb / 16 * _growth(name, new) + PROMPT * config.hidden_size * 2 * 12e-9
    batch = int((cap - weights) / per) // 16 * 16
    while batch >= 16:
        try:
            return Generation(model, config, name, device)(batch, new)
        except torch.cuda.OutOfMemoryError:
            say(f"{name}: {batch} sequences do not fit")
            batch = int(batch * 0.94) // 16 * 16
            _collect(device)
    return None


def _growth(name: str, new: int) -> float:
    """How much larger a cache is at the end than after 8 new tokens, at most."""
    return (PROMPT + new) / (PROMPT + 8) if name == "stock" else max(1.0, -(-(PROMPT + new) // 64) / -(-(PROMPT + 8) // 64))


def table(runs: list[Run], shape: str, new: int) -> Table:
    """The runs for people, against the first one's first batch."""
    result = Table(title=f"{shape}, {PROMPT} + {new} tokens a sequence; ~: of steps at three lengths", header_style="bold")
    for title in ("configuration", "batch", "tokens/s", "x first", "prompt s", "decode ms", "peak GB", "x less", "cache GB"):
        result.add_column(title, justify="left" if title == "configuration" else "right")
    first = runs[0]
    for run in runs:
        same = f"{first.peak_gb / run.peak_gb:.2f}" if run.batch == first.batch and run.peak_gb else ""
        result.add_row(
            run.name, str(run.batch), f"{'~' * run.sampled}{run.tokens_per_s:,.0f}", f"{run.tokens_per_s / first.tokens_per_s:.2f}",
            f"{run.prefill_s:.2f}", f"{run.decode_ms:.1f}", f"{run.peak_gb:.1f}", same, f"{run.cache_gb:.1f}",
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure and print; ``--json`` keeps the runs."""
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-2-7b", choices=sorted(SHAPES))
    parser.add_argument("--configurations", nargs="+", default=["stock", "kivi", "kivi(window=128)"])
    parser.add_argument("--cap", type=float, default=80.0, help="GB that the allocator may take")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", nargs="+", help=f"measure these batches, without a search; '{FULL}' for the most that the cap holds")
    parser.add_argument("--sampled", action="store_true", help="time stock's steps at three lengths")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds behind which no batch is begun")
    parser.add_argument("--turns", type=Path, help="a file by whose lock processes take turns on the device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    console = Console(width=140)
    if options.device == "cuda":
        console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * 1e9 / torch.cuda.get_device_properties(0).total_memory))
    model, config = build(options.shape, options.layers, options.hidden, options.device)
    runs: list[Run] = []
    for name in options.configurations:
        for run in measured(model, config, name, options, runs, begun, console):
            console.print(run)
            runs.append(run)
            if options.json:
                options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))
        _collect(options.device)
    if not runs:
        console.print(f"{options.cap} GB hold no batch of 16, or the limit was too short")
        return 1
    console.print(table(runs, options.shape, options.new))
    return 0


def measured(
    model: Any, config: Any, name: str, options: argparse.Namespace, runs: list[Run], begun: float, console: Console
) -> Iterator[Run]:
    """The runs of one configuration: of the batches that were asked for, or of the first one's largest and of its own."""
    if options.batch:
        generation = Generation(model, config, name, options.device, options.sampled)
        yield from listed(generation, weights_gb(model), options, begun, console.print)
        return
    found = largest(model, config, name, options.cap, options.new, options.device, console.print)
    if found is not None and runs and found.batch != runs[0].batch:
        yield Generation(model, config, name, options.device)(runs[0].batch, options.new)
    if found is not None:
        yield found


if __name__ == "__main__":
    sys.exit(main())
