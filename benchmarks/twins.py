"""The decode kernel of formats beside that of the scheme they are options of: correct first, then times, in about a minute.

    python benchmarks/twins.py [--shapes 1x131072,16x32768] [--budget SECONDS]

Kernels are rendered as ``kvcompile dump`` renders them, compiled by all cores, and launched bare: no merge of splits. Beside them the
rotation of queries that a rotated scheme adds to a step, compiled by Inductor. H=32, K=8, D=128, bfloat16, medians over CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from typing import Any

import torch
from attention import D, DeviceStandIn, H, K, graph_ms, store
from rich.console import Console
from rich.table import Table

from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import AttendConfig, Beside, plane_names
from kvcompile.lowering.decode.tiles import choose_tiles, splits_for
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body, rotate_channels_body
from kvcompile.types import PAGE, Role, SlotSpec

TWINS = ("int4", "int4(sinks=4)", "int4(sinks=64)", "int8", "int8(sinks=4)", "kivi", "kivi(sinks=4)", "kivi(sinks=64)", "normed",
         "normed(sinks=4)", "kivi(bits=4)", "kivi(bits=4,sinks=4)")
"""Each behind the one that it is held against: the last without options."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One rendered kernel, and how it is launched."""

    config: AttendConfig
    source: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.config.tile.num_warps, "num_stages": self.config.tile.num_stages}


def tensors_of(scheme: str, batch: int, tokens: int, device: str) -> tuple[AttendConfig, dict[str, torch.Tensor]]:
    """The kernel that is chosen without tuning, and its operands; on ``meta`` for their shapes alone."""
    made = schemes.parse(scheme)
    halves = [made.for_role(role) for role in Role]
    slots = [SlotSpec(K, D, torch.bfloat16, role) for role in Role]
    formats = [half.format(slot) for half, slot in zip(halves, slots, strict=True)]
    newest = made.window and made.window + 1
    beside = Beside(bool(newest), False, exact_first=made.sinks, exact_first_at=bool(made.sinks and not newest))
    packs = [plane.width if (plane := half.layout(slot).planes[1]).width in {2, 4} else 1 for half, slot in zip(halves, slots, strict=True)]
    base = AttendConfig(
        *(half.spec() for half in halves), D, D, K, H // K, torch.bfloat16, *(fmt.word_dtype for fmt in formats), D**-0.5, beside=beside,
        key_scale_pack=packs[0], value_scale_pack=packs[1],
    )
    properties = torch.cuda.get_device_properties(0)
    tiled = choose_tiles(base, H // K, PAGE, False, properties.shared_memory_per_block_optin)[0]
    config = tiled.with_splits(splits_for(tiled, H // K, batch * K, properties.multi_processor_count, tokens), False)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    found = {
        "Q": random(batch, H, 1, D), "HI": torch.full((batch, 1), tokens - 1, device=device),
        "RECENT_K": random(batch, K, max(newest, 1), D), "RECENT_V": random(batch, K, max(newest, 1), D),
        "BASE": torch.full((1,), tokens - newest, device=device),
        "EARLY_AT": torch.zeros(1, batch, 1, 1, 1, dtype=torch.int64, device=device),
        "EARLY_K": random(1, batch, K, max(made.sinks, 1), D), "EARLY_V": random(1, batch, K, max(made.sinks, 1), D),
    }
    for letter, half, slot, fmt in zip("KV", halves, slots, formats, strict=True):
        if device == "meta":
            specs = half.layout(slot).planes[: fmt.planes]
            planes = [torch.empty(spec.shape(tokens // PAGE, batch, K), dtype=spec.dtype, device="meta") for spec in specs]
        else:
            planes = store(half.spec(), batch, tokens, slot.role)
        found |= plane_names(letter, planes, fmt)
    return config, {name: found[name] for name in config.operands}


def rendered(scheme: str, batch: int, tokens: int) -> Kernel:
    """The kernel's source for these shapes."""
    config, operands = tensors_of(scheme, batch, tokens, "meta")
    out = torch.empty((config.splits, batch, H, 1, D + 2), device="meta")
    source = offline.render(config, {name: offline.Operand.of(item) for name, item in operands.items()}, offline.Operand.of(out))
    return Kernel(config, source, (*(item.dtype for item in operands.values()), torch.float32))


def compile_one(kernel: Kernel) -> str | None:
    """Fill Triton's cache with one kernel; returns what went wrong."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    driver.set_active(DeviceStandIn())
    try:
        function = getattr(offline.load_module(kernel.source), offline.KERNEL)
        function.warmup(*(MockTensor(dtype) for dtype in kernel.dtypes), grid=(1, 1, 1), **kernel.options)
    except Exception as error:
        return f"{kernel.config.key_scheme}: {type(error).__name__} {str(error)[:300]}"
    return None


def measure(scheme: str, batch: int, tokens: int, kernel: Kernel) -> tuple[float, float]:
    """(ms, relative error of the merged result against the eager definition in float32)."""
    config, operands = tensors_of(scheme, batch, tokens, "cuda")
    out = torch.empty((config.splits, batch, H, 1, D + 2), device="cuda")
    function = getattr(offline.load_module(kernel.source), offline.KERNEL)

    def call() -> Any:
        return function[(1, batch * K, config.splits)](*operands.values(), out, **kernel.options)

    call()
    top = out[..., -2:-1].amax(0)
    weight = torch.exp2(out[..., -2:-1] - top)
    found = (out[..., :-2] * weight).sum(0) / (out[..., -1:] * weight).sum(0)
    exact_newest = [operands["RECENT_K"], operands["RECENT_V"]] if config.beside.exact_newest else None
    exact_first = [operands["EARLY_K"], operands["EARLY_V"]] if config.beside.exact_first else None
    planes = [[operands[name] for name in (f"{letter}_{part}" for part in ("WORDS", "SCALES", "ZEROS", "NORMS")) if name in operands]
              for letter in "KV"]
    exact = attend_body(AttendOperands(
        operands["Q"].float(), *planes, operands["HI"], None, None, None, None, config.key_scheme, config.value_scheme, D**-0.5, 0.0, D,
        exact_newest, operands.get("BASE"), exact_first=exact_first, exact_first_at=operands.get("EARLY_AT"),
    ))
    return graph_ms(call), ((found - exact).norm() / exact.norm()).item()


def main() -> None:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="1x131072,16x32768")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds after which no further kernel is timed")
    options = parser.parse_args()
    started = time.perf_counter()
    shapes = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
    jobs = {(scheme, *shape): rendered(scheme, *shape) for shape in shapes for scheme in TWINS}
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        print(*filter(None, pool.map(compile_one, jobs.values(), chunksize=1)), sep="\n", flush=True)
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    table = Table(title=f"bare decode kernels, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("B", "T", "scheme", "ms", "of its twin", "relative error"):
        table.add_column(column, justify="right")
    plain = 0.0
    for (scheme, batch, tokens), kernel in jobs.items():
        if time.perf_counter() - started > options.budget:
            print(f"budget spent: {scheme} {batch}x{tokens} not measured")
            continue
        try:
            ms, error = measure(scheme, batch, tokens, kernel)
        except Exception as failure:
            print(f"{scheme} {batch}x{tokens} failed: {type(failure).__name__} {str(failure)[:300]}")
            continue
        plain = ms if scheme in {"int4", "int8", "kivi", "kivi(bits=4)"} else plain
        table.add_row(str(batch), str(tokens), scheme, f"{ms:.4f}", f"{ms / plain:.3f}" if plain else "-", f"{error:.1e}")
        torch.cuda.empty_cache()
    Console(width=120).print(table)
    q = torch.randn(1, H, 1, D, device="cuda", dtype=torch.bfloat16)
    turned = torch.compile(lambda q: rotate_channels_body(q * 1.0, D, None, False))
    plain_ms = graph_ms(lambda: torch.add(q, 1.0))
    turned(q)
    print(
        f"rotation of one token's queries: {graph_ms(lambda: turned(q)):.5f} ms; an elementwise kernel: {plain_ms:.5f} ms"
    )


if __name__ == "__main__":
    main()
