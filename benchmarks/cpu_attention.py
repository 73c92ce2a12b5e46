"""One decode step's attention on a CPU: our kernel against SDPA and against stock Inductor's static cache.

    python benchmarks/cpu_attention.py [--tokens 1024 4096 8192] [--threads 1 2] [--json out.json]

Each row is one (shape, dtype, tokens, threads); each cell the median milliseconds of a step with all tokens
in use. ``sdpa`` reads a dense cache of exactly that length with enable_gqa; ``stock`` is what a transformers
StaticCache step compiles to: index_copy_ into a cache of ``--capacity-factor`` times the tokens, K and V
repeated for the query heads, a mask over the capacity, SDPA. Ours attend over the same capacity's planes.
A kernel that is not correct is not timed: its error against float64 is checked first. Kernels take turns
round by round, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from kvcompile import schemes
from kvcompile.lowering import inductor
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.types import PAGE

SCHEMES = ("dense", "int8", "fp8", "int4")
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads and width of one attention layer."""

    heads: int
    kv_heads: int
    width: int


SHAPES = (Shape(32, 8, 128), Shape(8, 8, 64))


@dataclass(frozen=True)
class Row:
    """One measured configuration; ``ms`` by kernel name."""

    shape: Shape
    dtype: str
    tokens: int
    threads: int
    ms: dict[str, float]
    error: dict[str, float]


def store(x_BKTD: torch.Tensor, scheme: str, pages: int) -> list[torch.Tensor]:
    """Planes of ``pages`` pages, the first of which hold x."""
    planes = []
    for rows in schemes.parse(scheme).encode(x_BKTD):
        plane = rows.new_zeros(pages, *rows.shape[:2], PAGE, rows.shape[-1])
        ops.write_rows(plane, rows, torch.arange(rows.shape[2])[None])
        planes.append(plane)
    return planes


def ours(scheme: str, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: int) -> tuple[Step, float]:
    """A compiled step and its error against float64 over the error that it may have."""
    keys, values = store(k, scheme, pages), store(v, scheme, pages)
    hi = torch.full((1, 1), k.shape[2] - 1)
    scale = shape.width**-0.5

    def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], hi: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, keys, values, hi, None, None, None, None, scheme, scheme, scale, 0.0, shape.width)

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    rest = (keys, values, hi, None, None, None, None, scheme, scheme, scale, 0.0, shape.width)
    exact = ops.attend_body(AttendOperands(q.double(), *rest), compute=torch.float64)
    eager = ops.attend_body(AttendOperands(q, *rest))
    allowed = 2 * ((eager.double() - exact).abs().max() + torch.finfo(q.dtype).eps * exact.abs().max())
    share = ((compiled(q, keys, values, hi).double() - exact).abs().max() / allowed).item()
    return lambda: compiled(q, keys, values, hi), share


def stock(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, capacity: int) -> Step:
    """Stock Inductor's static-cache step: write, repeat, mask, SDPA over the capacity."""
    tokens, groups = k.shape[2], shape.heads // shape.kv_heads
    cache_k, cache_v = (F.pad(x, (0, 0, 0, capacity - tokens)) for x in (k, v))

    def step(
        q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor
    ) -> torch.Tensor:
        cache_k.index_copy_(2, pos, k)
        cache_v.index_copy_(2, pos, v)
        mask = (torch.arange(cache_k.shape[2]) <= pos)[None, None, None]
        full_k, full_v = (
            x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(1, shape.heads, capacity, shape.width) for x in (cache_k, cache_v)
        )
        return F.scaled_dot_product_attention(q, full_k, full_v, attn_mask=mask)

    compiled = torch.compile(step, dynamic=False, fullgraph=True)
    pos, new_k, new_v = torch.tensor([tokens - 1]), k[:, :, -1:].clone(), v[:, :, -1:].clone()
    return lambda: compiled(q, cache_k, cache_v, new_k, new_v, pos)


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, measured in turns."""
    for step in steps.values():
        for _ in range(3):
            step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            # Twice, so that what is timed starts with its own data as warm as a decode loop has it.
            step()
            start = time.perf_counter()
            step()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(shape: Shape, dtype: torch.dtype, tokens: int, threads: int, factor: float, rounds: int) -> Row:
    """All kernels on one configuration."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch.manual_seed(0)
    q = torch.randn(1, shape.heads, 1, shape.width, dtype=dtype)
    k, v = torch.randn(2, 1, shape.kv_heads, tokens, shape.width, dtype=dtype).unbind()
    capacity = -(-int(tokens * factor) // PAGE) * PAGE
    steps: dict[str, Step] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "stock": stock(shape, q, k, v, capacity),
    }
    error = {}
    for scheme in SCHEMES:
        step, share = ours(scheme, shape, q, k, v, capacity // PAGE)
        error[scheme] = share
        if share <= 1:
            steps[scheme] = step
    return Row(shape, str(dtype).removeprefix("torch."), tokens, threads, medians(steps, rounds), error)


def show(rows: list[Row], console: Console) -> None:
    """A table of milliseconds, with the ratio to SDPA for ours."""
    table = Table(title=f"ms per decode step of one layer; {platform.processor() or platform.machine()}, torch {torch.__version__}")
    for column in ("H/K/D", "dtype", "tokens", "threads", "sdpa", "stock", *SCHEMES):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row.shape.heads}/{row.shape.kv_heads}/{row.shape.width}", row.dtype, str(row.tokens), str(row.threads)]
        cells += [f"{row.ms[name]:.2f}" for name in ("sdpa", "stock")]
        for scheme in SCHEMES:
            wrong = f"[red]wrong x{row.error[scheme]:.1f}[/red]"
            cells.append(f"{row.ms[scheme]:.2f} ({row.ms['sdpa'] / row.ms[scheme]:.1f}x)" if scheme in row.ms else wrong)
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--capacity-factor", type=float, default=1.0, help="capacity of the caches over the tokens in use")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    options = parser.parse_args()
    inductor.install()
    rows = [
        measure(shape, dtype, tokens, threads, options.capacity_factor, options.rounds)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for tokens in options.tokens
        for threads in options.threads
    ]
    show(rows, Console(width=140))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
