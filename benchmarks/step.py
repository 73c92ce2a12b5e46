"""One decode step of a Llama-3.1-8B-shaped model with random weights: ms per token and peak memory.

Stock eager, stock torch.compile (default, reduce-overhead) and kvcompile's schemes in one run. ``--prompt compiled`` runs
a prompt of random tokens through the compiled model into an empty cache, as a user does (kvcompile only: stock's mask of the whole
prompt does not fit at 128K); ``--prompt filled`` begins with a cache of random keys and values. ``--padding N``: a mask hides the
first tokens of the rows, N of the last one. The floor is weights plus cache bytes once at the bandwidth given. Correctness gate
before anything is timed: ``dense`` is at most twice as far from stock eager as stock torch.compile is, plus half a percent.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from padding import shown
from rich.console import Console
from rich.table import Table
from turns import turn

import kvcompile

BANDWIDTH = 4.3e12
SHAPES = ((1, 32768), (1, 131072), (8, 32768))


@dataclass
class Row:
    """One measured configuration; times in ms, memory in GB."""

    name: str
    batch: int
    context: int
    ms: float
    floor_ms: float
    cache_gb: float
    peak_gb: float
    warm_s: float
    graphs: int = 0
    pass_s: float = 0.0
    compile_s: float = 0.0
    windows: tuple[float, ...] = ()
    moving: tuple[bool, ...] = ()
    """Whether a scheme that gives tokens widths of their own changed any in a window: where it did not, the step is at rest."""


def build(layers: int) -> tuple[Any, Any]:
    """The model on the GPU in bfloat16, without reading any weights."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=131072 + 1024, rope_theta=500000.0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, 0.02, generator=generator)
    # Buffers made on meta are garbage after to_empty: the rotary frequencies are computed again.
    rotary = model.model.rotary_emb
    inverse = 1.0 / (500000.0 ** (torch.arange(0, 128, 2, device="cuda").float() / 128))
    rotary.inv_freq = inverse
    rotary.original_inv_freq = inverse.clone()
    return model, config


def filled(config: Any, batch: int, context: int, capacity: int) -> Any:
    """A StaticCache of ``capacity`` tokens whose first ``context`` are random."""
    cache = transformers.StaticCache(config, max_cache_len=capacity)
    generator = torch.Generator("cuda").manual_seed(1)
    for layer in cache.layers:
        seed = torch.empty(batch, config.num_key_value_heads, 1, config.head_dim, device="cuda", dtype=torch.bfloat16)
        layer.lazy_initialization(seed, seed)
        layer.keys[:, :, :context].normal_(generator=generator)
        layer.values[:, :, :context].normal_(generator=generator)
        layer.cumulative_length.fill_(context)
    return cache


def clear() -> None:
    """Free what the last configuration left."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(
    step: Any, steps: int, warm: int, turns: Path | None = None, windows: int = 1, changes: Callable[[], int] = lambda: 0,
) -> tuple[list[float], list[bool], float]:
    """(median ms of each window of steps, whether ``changes`` grew in it, warm-up s); each step from host to host, its stream drained.

    Windows lie a second apart: where another process ran a prompt meanwhile, some are slower, and the least is the step's.
    """
    started = time.perf_counter()
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    medians, moving = [], []
    for window in range(windows):
        time.sleep(1.0 if window else 0.0)
        samples, before = [], changes()
        with turn(turns):
            torch.cuda.synchronize()
            for _ in range(steps):
                begin = time.perf_counter()
                step()
                # What a step waits for; decisions that run beside steps, on a stream of their own, are not drained.
                torch.cuda.current_stream().synchronize()
                samples.append((time.perf_counter() - begin) * 1e3)
        medians.append(statistics.median(samples))
        moving.append(changes() != before)
    return medians, moving, warm_s


def by_kernel(step: Any, steps: int = 5, most: int = 24) -> str:
    """Device microseconds of a step and launches in it by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times = found.setdefault(event.name[:90], [0.0, 0.0])
            times[0] += event.device_time / steps
            times[1] += 1 / steps
    rows = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    return "\n".join(f"  {us:9.1f} us {count:6.1f}  {name}" for name, (us, count) in rows)


def measure(
    model: Any, config: Any, name: str, batch: int, context: int, steps: int, owners: dict[Any, Any], turns: Path | None = None,
    prompt: str = "filled", windows: int = 1, profiled: bool = False, warm: int = 0, padding: int = 0,
) -> Row:
    """One configuration: ``eager``, ``stock``, ``stock:reduce-overhead``, or ``scheme[+fold][:mode]``."""
    clear()
    kind, _, mode = name.partition(":")
    compiled_prompt = prompt == "compiled" and kind not in {"eager", "stock"}
    capacity = context + 1024
    cache = transformers.StaticCache(config, max_cache_len=capacity) if compiled_prompt else filled(config, batch, context, capacity)
    owner = None
    if kind == "eager":
        call = model
    elif kind == "stock":
        call = torch.compile(model, mode=mode or None)
    else:
        scheme, _, fold = kind.partition("+")
        owner = owners.setdefault((kind, mode), kvcompile.backend(scheme, strict=True, fold=bool(fold)))
        call = torch.compile(model, backend=owner, mode=mode or None, fullgraph=True)
    before = len(owner.graphs) if owner is not None else 0
    token, keep = torch.randint(0, 1000, (batch, 1), device="cuda"), shown(batch, capacity, padding)
    mask = None if keep is None else keep.long()
    if compiled_prompt:
        tokens = torch.randint(0, 1000, (batch, context), device="cuda")
        with torch.no_grad():
            call(tokens, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step() -> None:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        call(token, attention_mask=mask, past_key_values=cache, use_cache=True)

    def changes() -> int:
        churn = owner.report().churn if owner is not None else None
        return churn.allocations + churn.moved if churn is not None else 0

    medians, moving, warm_s = timed(step, steps, warm or (6 if mode else 4), turns, windows, changes)
    if profiled:
        with turn(turns):
            print(by_kernel(step))
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.model.embed_tokens.weight.numel() * 2
    dense = 2 * batch * config.num_key_value_heads * config.head_dim * context * 2 * config.num_hidden_layers
    held = owner.report().allocated if owner is not None else dense
    return Row(
        name, batch, context, min(medians), (weights + held) / BANDWIDTH * 1e3, held / 1e9, torch.cuda.max_memory_allocated() / 1e9, warm_s,
        *_compile_share(owner.graphs[before:] if owner is not None else []), tuple(medians), tuple(moving),
    )


def _compile_share(graphs: list[Any]) -> tuple[int, float, float]:
    return len(graphs), sum(graph.pass_seconds for graph in graphs), sum(graph.compile_seconds for graph in graphs)


def gate(model: Any, config: Any) -> tuple[float, float]:
    """Relative errors against stock eager of (``dense``, stock torch.compile): a step at 4,000 tokens, first 4 layers.

    Bfloat16 rounding alone moves a deep random model's logits by percents, so stock's own distance is the measure.
    """
    clear()
    token = torch.randint(0, 1000, (1, 1), device="cuda")
    layers, count = model.model.layers, config.num_hidden_layers
    model.model.layers, config.num_hidden_layers = layers[:4], min(4, count)
    try:
        with torch.no_grad():
            want = model(token, past_key_values=filled(config, 1, 4000, 5000)).logits.float()
            call = torch.compile(model, backend=kvcompile.backend("dense", strict=True), fullgraph=True)
            ours = call(token, past_key_values=filled(config, 1, 4000, 5000)).logits.float()
            torch._dynamo.reset()
            stock = torch.compile(model)(token, past_key_values=filled(config, 1, 4000, 5000)).logits.float()
    finally:
        model.model.layers, config.num_hidden_layers = layers, count
    return tuple(((got - want).norm() / want.norm()).item() for got in (ours, stock))  # type: ignore[return-value]


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    result = Table(title="one decode step, Llama-3.1-8B shape, random bf16 weights", header_style="bold")
    for title in ("batch", "context", "configuration", "ms/token step", "floor ms", "x floor", "cache GB", "peak GB", "warm-up s"):
        result.add_column(title, justify="left" if title == "configuration" else "right")
    for row in rows:
        result.add_row(
            str(row.batch), f"{row.context:,}", row.name, f"{row.ms:.2f}", f"{row.floor_ms:.2f}", f"{row.ms / row.floor_ms:.2f}",
            f"{row.cache_gb:.2f}", f"{row.peak_gb:.1f}", f"{row.warm_s:.0f}",
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure and print; ``--json`` keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--configurations", default="eager,stock,stock:reduce-overhead,dense,int8,fp8,int4,int4:reduce-overhead")
    parser.add_argument("--shapes", default=",".join(f"{b}x{t}" for b, t in SHAPES))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further configuration starts")
    parser.add_argument("--turns", type=Path, help="a file by whose lock processes that compile side by side take turns to be timed")
    parser.add_argument("--windows", type=int, default=1, help="windows of --steps steps, a second apart; the least median counts")
    parser.add_argument("--warm", type=int, default=0, help="steps before the first window (default: 4, with CUDA graphs 6)")
    parser.add_argument("--prompt", choices=["filled", "compiled"], default="filled")
    parser.add_argument("--padding", type=int, default=0, help="tokens that a mask hides in the last row, fewer in each one before")
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also print the device time of a step by kernel")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    started = time.perf_counter()
    model, config = build(options.layers)
    console = Console(width=150)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    console.print(f"{torch.cuda.get_device_name()}, {versions}, {options.layers} layers")
    if not options.no_gate:
        ours, stock = gate(model, config)
        console.print(f"gate: relative error against stock eager: dense {ours:.4f}, stock torch.compile {stock:.4f}")
        if not ours <= 2 * stock + 0.005:
            return 1
    rows: list[Row] = []
    owners: dict[Any, Any] = {}
    for name in options.configurations.split(","):
        for shape in options.shapes.split(","):
            batch, context = (int(part) for part in shape.split("x"))
            if time.perf_counter() - started > options.budget:
                console.print(f"budget spent: {name} {shape} not measured")
                continue
            try:
                rows.append(measure(
                    model, config, name, batch, context, options.steps, owners, options.turns, options.prompt, options.windows,
                    options.profile, options.warm, options.padding,
                ))
                console.print(f"{time.perf_counter() - started:.0f} s: {rows[-1]}")
                for owner in owners.values():
                    # Where attention has a certificate: what fell back is part of the time.
                    if (told := owner.telemetry())["head_steps"]:
                        console.print(str(told), markup=False)
            except Exception as error:
                console.print(f"{name} {shape} failed: {type(error).__name__}: {str(error)[:600]}")
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    console.print(table(sorted(rows, key=lambda row: (row.batch, row.context))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
