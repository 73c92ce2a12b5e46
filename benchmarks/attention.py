"""One new token over a long past: attend by scheme against SDPA, correctness first.

    python benchmarks/attention.py [--json FILE] [--quick] [--twins] [--shapes 1x8192,..] [--sweep decode|extend] [--extend] [--profile T]
        [--padding N]

H=32 query heads, K=8 kv heads, D=128, bfloat16. Times are medians over CUDA-graph replays, so launches are
not counted against anybody. "Roof" is the time that the scheme's bytes need at 4.3 TB/s, the copy bandwidth of
an H200. ``--twins`` times formats beside the schemes that they are options of: rotated channels, with the rotation of queries and
results, first tokens kept exact, keys without their norms. ``--padding``: a mask hides the first 1 to N tokens of the rows,
more of each row than of the one before; SDPA has none. ``--sweep`` times the bare kernel over tiles and splits (what
``lowering/decode/tiles.py`` was chosen by).
"""

# ruff: noqa: B023 - closures are timed within the iteration that makes them.

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
from typing import NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.padding import shown
from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import AttendConfig, Tile, plane_names
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body, rotate_channels_body
from kvcompile.types import PAGE, Role, SlotSpec, pages_for

H, K, D = 32, 8, 128
BANDWIDTH = 4.3e12
TABLES = ("beyond(bits=2)", "beyond(bits=3)", "beyond", "beyond(bits=5)", "nf4")
SCHEMES = ("dense", "int8", "fp8", "int4", "kivi(bits=4)", "kivi(bits=2)", *TABLES)
TWINS = (
    "int4", "int4(rotate=kv)", "int4(sinks=4)", "int4(sinks=64)", "int8", "int8(rotate=k,sinks=4)", "kivi(bits=2)", "kivi(rotate=kv)",
    "kivi(sinks=4)", "kivi(sinks=64)", "normed", "normed(turn=both)",
)
SHAPES = ((1, 131072), (16, 32768), (1, 8192), (1, 4096), (1, 2048), (1, 1024))


def store(scheme: str, batch: int, tokens: int, role: Role) -> list[torch.Tensor]:
    """The planes that a kernel reads, of ``tokens`` random tokens, encoded in pieces to keep the peak low."""
    parsed = schemes.parse(scheme).for_role(role)
    pages = pages_for(tokens)
    slot = SlotSpec(K, D, torch.bfloat16, role)
    fmt = parsed.format(slot)
    specs = parsed.layout(slot).planes[: fmt.planes]
    planes = [torch.empty(p.shape(pages, batch, K), dtype=p.dtype, device="cuda") for p in specs]
    if fmt.levels:
        # As learned ones: near the uniform ones, and different in every table.
        planes[-1].copy_(torch.arange(fmt.levels, device="cuda") + torch.rand(planes[-1].shape, device="cuda") / 2)
    for page in range(0, pages, 64):
        count = min(64, pages - page)
        x = torch.randn(batch, K, count * PAGE, D, device="cuda").to(torch.bfloat16)
        for plane, rows in zip(planes, parsed.encode(x)[: len(planes) - bool(fmt.levels)], strict=False):
            plane[page : page + count] = rows.unflatten(2, (count, plane.shape[3])).permute(2, 0, 1, 3, 4).to(plane.dtype)
    return planes


def graph_ms(call, repeats: int = 20, replays: int = 15) -> float:
    """Median time of one ``call`` among ``repeats`` in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def sdpa_ms(batch: int, tokens: int, backend) -> float | None:
    """SDPA with grouped heads over contiguous bfloat16 K and V."""
    from torch.nn.attention import sdpa_kernel

    q = torch.randn(batch, H, 1, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, K, tokens, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            return graph_ms(call)
    except RuntimeError as error:
        print(f"{backend}: {error}", file=sys.stderr)
        return None


class Asked(NamedTuple):
    """Operands of one attention; ``plane``: what a scheme adds to its rotation; ``keep`` [B, T]: which are no padding."""

    scheme: str
    spell: str
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hi: torch.Tensor
    exact_newest: list[torch.Tensor] | None = None
    base: torch.Tensor | None = None
    exact_first: list[torch.Tensor] | None = None
    exact_first_at: torch.Tensor | None = None
    plane: torch.Tensor | None = None
    keep: torch.Tensor | None = None


def attend_call(scheme: str, batch: int, tokens: int, mode: str | None, padding: int = 0):
    """A compiled attend over a fresh store, its operands, and the bytes that it must read.

    A scheme with a window reads its newest tokens from there: the window and the token of this step.
    """
    from kvcompile.lowering import inductor

    inductor.install()
    spell = schemes.parse(scheme).spec()
    keys, values = store(scheme, batch, tokens, Role.KEY), store(scheme, batch, tokens, Role.VALUE)
    q = torch.randn(batch, H, 1, D, device="cuda", dtype=torch.bfloat16)
    hi = torch.full((1, 1), tokens - 1, device="cuda")
    for plane in (*keys, *values):
        torch._dynamo.maybe_mark_dynamic(plane, 0)
    newest = schemes.parse(scheme).window and schemes.parse(scheme).window + 1
    exact_newest = [torch.randn(batch, K, newest, D, device="cuda").to(torch.bfloat16) for _ in range(2)] if newest else None
    base = torch.full((1,), tokens - newest, device="cuda") if newest else None
    first = schemes.parse(scheme).sinks
    exact_first = [torch.randn(1, batch, K, first, D, device="cuda").to(torch.bfloat16) for _ in range(2)] if first else None
    exact_first_at = torch.zeros(1, batch, 1, 1, 1, dtype=torch.int64, device="cuda") if first and not newest else None
    plane = torch.randn(1, 1, K, D, D, device="cuda") / D**0.5
    keep = shown(batch, tokens, padding)

    # Found here: torch 2.11 does not trace through the parsing of a scheme.
    rotations = [rotation_of(scheme, role) for role in Role]

    def attend(q, keys, values, hi, exact_newest, base, exact_first, exact_first_at, plane, keep):
        out = torch.ops.kvcompile.attend(
            turned(rotations[0], q, plane, False), keys, values, hi, None, keep, None, None, spell, spell, D**-0.5, 0.0, D, exact_newest,
            base,
            exact_first=exact_first, exact_first_at=exact_first_at,
        )
        return turned(rotations[1], out, plane, True)

    run = torch.compile(attend, fullgraph=True, mode=mode)
    size = sum(item.numel() * item.element_size() for item in (*keys, *values, *(exact_newest or ()), *(exact_first or ())))
    asked = Asked(scheme, spell, q, keys, values, hi, exact_newest, base, exact_first, exact_first_at, plane, keep)
    return (lambda: run(*asked[2:])), asked, size


def rotation_of(scheme: str, role: Role) -> tuple[int, bool] | None:
    """The order of the rotation of keys or values, and whether a plane adds to it; None where channels stay as they are."""
    rotation = schemes.parse(scheme).for_role(role).rotation(SlotSpec(K, D, torch.bfloat16, role))
    return None if rotation is None else (rotation.order, rotation.plane is not None)


def turned(rotation: tuple[int, bool] | None, x: torch.Tensor, plane: torch.Tensor | None, back: bool) -> torch.Tensor:
    """Queries rotated as a scheme's keys are, or results of its values rotated ``back``."""
    return x if rotation is None else rotate_channels_body(x, rotation[0], plane if rotation[1] else None, back)


def relative_error(out: torch.Tensor, asked: Asked) -> float:
    """Distance from the same codes' attention in float32; rows one after the other, as decoded tokens are many."""
    scheme, spell, q, keys, values, hi, exact_newest, base, exact_first, exact_first_at, plane, keep = asked
    wrong = right = 0.0
    for row in range(q.shape[0]):
        one = slice(row, row + 1)

        def of(planes: list[torch.Tensor] | None, one: slice = one) -> list[torch.Tensor] | None:
            return planes and [plane[:, one] if plane.shape[1] > 1 else plane for plane in planes]

        newest = [x[one] for x in exact_newest] if exact_newest else None
        added = None if plane is None else plane[:, one] if plane.shape[1] > 1 else plane
        at = exact_first_at[:, one] if exact_first_at is not None and exact_first_at.shape[1] > 1 else exact_first_at
        queries = turned(rotation_of(scheme, Role.KEY), q[one].float(), added, False)
        exact = attend_body(AttendOperands(
            queries, of(keys), of(values), hi, None, None if keep is None else keep[one], None, None, spell, spell, D**-0.5, 0.0, D, newest,
            base, exact_first=of(exact_first), exact_first_at=at,
        ))
        exact = turned(rotation_of(scheme, Role.VALUE), exact, added, True)
        wrong += (out[one].float() - exact).square().sum().item()
        right += exact.square().sum().item()
    return (wrong / right) ** 0.5


def measure(shapes, names: list[str], mode: str | None, padding: int = 0) -> list[dict]:
    from torch.nn.attention import SDPBackend

    rows = []
    for batch, tokens in shapes:
        cudnn, flash = (sdpa_ms(batch, tokens, b) for b in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
        for scheme in names:
            torch._dynamo.reset()
            try:
                call, operands, size = attend_call(scheme, batch, tokens, mode, padding)
                error = relative_error(call(), operands)
                if not error < 1e-2:
                    print(f"{scheme} at B={batch} T={tokens} is wrong: relative error {error:.3g}; no times", file=sys.stderr)
                    continue
                ms = graph_ms(call)
            except Exception as failure:  # The others are measured all the same.
                print(f"{scheme} at B={batch} T={tokens}: {type(failure).__name__}: {str(failure)[-400:]}", file=sys.stderr)
                continue
            best = min(x for x in (cudnn, flash, float("inf")) if x is not None)
            rows.append({
                "scheme": scheme, "batch": batch, "tokens": tokens, "ms": ms, "sdpa_cudnn_ms": cudnn, "sdpa_flash_ms": flash,
                "speedup_cudnn": cudnn / ms if cudnn else None, "speedup_best": best / ms, "roof_share": size / BANDWIDTH * 1e3 / ms,
                "relative_error": error,
            })
            del call, operands
            torch.cuda.empty_cache()
    return rows


def measure_extend() -> None:
    """Several new tokens over a compressed past, and causal prefill of a fresh prompt, against SDPA."""
    from kvcompile.lowering import inductor

    inductor.install()
    for new, tokens in ((4, 32768), (16, 32768), (512, 32768)):
        q = torch.randn(1, H, new, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, K, tokens, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        dense = graph_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), 3, 5)
        hi = torch.arange(tokens - new, tokens, device="cuda").unsqueeze(0)
        for scheme in SCHEMES:
            torch._dynamo.reset()
            spell = schemes.parse(scheme).spec()
            keys, values = store(scheme, 1, tokens, Role.KEY), store(scheme, 1, tokens, Role.VALUE)
            run = torch.compile(lambda: torch.ops.kvcompile.attend(
                q, keys, values, hi, None, None, None, None, spell, spell, D**-0.5, 0.0, D
            ))
            error = relative_error(run(), Asked(scheme, spell, q, keys, values, hi))
            ms = graph_ms(run, 3, 5)
            print(f"S={new} T={tokens} {scheme}: {ms:.4f} ms, SDPA without a mask {dense:.4f} ms, error {error:.1e}", flush=True)
    for tokens in (2048, 8192):
        q = torch.randn(1, H, tokens, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, K, tokens, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        dense = graph_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 3, 5)
        hi = torch.arange(tokens, device="cuda").unsqueeze(0)
        torch._dynamo.reset()
        run = torch.compile(lambda: torch.ops.kvcompile.attend(
            q, [k.unsqueeze(0)], [v.unsqueeze(0)], hi, None, None, None, None, "dense()", "dense()", D**-0.5, 0.0, D))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        error = ((run() - expected).float().norm() / expected.float().norm()).item()
        print(f"prefill S=T={tokens} dense: {graph_ms(run, 3, 5):.4f} ms, SDPA causal {dense:.4f} ms, difference {error:.1e}", flush=True)


def profile(tokens: int, names: list[str]) -> None:
    """Device time of each kernel of one call."""
    for scheme in names:
        torch._dynamo.reset()
        call, _, _ = attend_call(scheme, 1, tokens, None)
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(20):
                call()
            torch.cuda.synchronize()
        times = {event.key[:40]: round(event.device_time, 2) for event in found.key_averages()}
        print(scheme, tokens, times, flush=True)


def show(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"attend, one new token, H={H} K={K} D={D} bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("B", "T", "scheme", "ms", "cuDNN ms", "flash ms", "x cuDNN", "x best", "of roof", "rel. error"):
        table.add_column(column, justify="right")
    for row in rows:
        cudnn, flash = (f"{row[key]:.4f}" if row[key] else "-" for key in ("sdpa_cudnn_ms", "sdpa_flash_ms"))
        speedup = f"{row['speedup_cudnn']:.2f}" if row["speedup_cudnn"] else "-"
        table.add_row(
            str(row["batch"]), str(row["tokens"]), row["scheme"], f"{row['ms']:.4f}", cudnn, flash, speedup, f"{row['speedup_best']:.2f}",
            f"{row['roof_share']:.0%}", f"{row['relative_error']:.1e}",
        )
    Console(width=130).print(table)


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel of a sweep and the shape to time it at."""

    config: AttendConfig
    batch: int
    tokens: int
    queries: int = 1

    @property
    def source(self) -> str:
        return offline.attend_source(self.config, self.batch, self.queries)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (-(-self.queries * H // K // self.config.tile.rows), self.batch * K, self.config.splits)


def base_config(scheme: str, **changes: object) -> AttendConfig:
    spell = schemes.parse(scheme).spec()
    word = schemes.parse(scheme).format(SlotSpec(K, D, torch.bfloat16, Role.KEY)).word_dtype
    made = schemes.parse(scheme).for_role(Role.VALUE).format(SlotSpec(K, D, torch.bfloat16, Role.VALUE))
    pack = D // made.group if made.scaled and D // made.group in {2, 4} else 1
    base = AttendConfig(
        spell, spell, D, D, K, H // K, torch.bfloat16, word, word, D**-0.5, key_scale_pack=pack, value_scale_pack=pack,
    )
    return dataclasses.replace(base, **changes)


def decode_jobs(scheme: str, batch: int, tokens: int) -> list[Job]:
    """Every tile times a few split counts."""
    tiles = [(64, 1, 2), (64, 1, 3), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3)]
    programs: tuple[int, ...] = (4, 8, 16)
    if scheme in {"int8", "fp8"}:
        tiles, programs = [(32, 1, 2), (32, 1, 3), (32, 1, 4), (64, 1, 2), (64, 1, 3), (64, 2, 3), (64, 4, 3)], (4, 8, 12, 16)
    elif scheme != "dense":
        tiles = [(32, 1, 2), (32, 1, 3), (32, 1, 4), (32, 2, 3), (32, 4, 3)]
    made = [Tile(block, 8, True, warps, stages) for block, warps, stages in tiles]
    if scheme in TABLES:
        picked = range(3) if base_config(scheme).plans[1].bits == 4 else range(1)
        made = [Tile(32, 8, True, 1, stages, 2, each) for stages in (2, 3) for each in picked]
        programs = (6, 8)
    return [
        Job(base_config(scheme, splits=max(1, 132 * each // (batch * K)), tile=tile), batch, tokens)
        for tile, each in itertools.product(made, programs)
    ]


def extend_jobs(scheme: str, queries: int, tokens: int) -> list[Job]:
    """Tiles for many rows."""
    tiles = [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2), (32, 128, 4, 3),
        (64, 256, 8, 2),
    ]
    jobs = []
    for block_t, block_r, warps, stages in tiles:
        programs = -(-queries * H // K // block_r) * K
        splits = 1 if programs >= 132 else max(1, 264 // programs)
        direct = scheme == "dense" and splits == 1
        for first in (False, True):
            if first and block_r > 128:
                continue
            tile = Tile(block_t, block_r, first, warps, stages)
            jobs.append(Job(base_config(scheme, splits=splits, direct=direct, one_query=False, tile=tile), 1, tokens, queries))
    return jobs


class DeviceStandIn:
    """What triton asks of a driver to compile; worker processes never touch the device."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(job: Job) -> str | None:
    """Fill triton's cache with one kernel of the sweep."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    driver.set_active(DeviceStandIn())
    config = job.config
    kernel = getattr(offline.load_module(job.source), offline.KERNEL)
    operands = offline.operands_for(config, job.batch, job.queries)
    out = offline.output_for(config, job.batch, job.queries)
    tensors = [MockTensor(operands[name].dtype) for name in config.operands] + [MockTensor(out.dtype)]
    options = {"num_warps": config.tile.num_warps, "num_stages": config.tile.num_stages}
    try:
        kernel.warmup(*tensors, pages_for(job.tokens), grid=(1, 1, 1), **options)
    except Exception as error:  # A tile that does not fit is a result.
        return f"{config.tile}: {type(error).__name__} {str(error)[:200]}"
    return None


def sweep(groups: list[list[Job]]) -> list[dict]:
    """Times of the bare kernel, without the merge; one group shares its operands."""
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        print(*set(filter(None, pool.map(compile_one, itertools.chain.from_iterable(groups), chunksize=1))), sep="\n", flush=True)
    rows = []
    for jobs in groups:
        batch, tokens, queries = jobs[0].batch, jobs[0].tokens, jobs[0].queries
        scheme = jobs[0].config.key_scheme
        keys, values = store(scheme, batch, tokens, Role.KEY), store(scheme, batch, tokens, Role.VALUE)
        tensors = {
            "Q": torch.randn(batch, H, queries, D, device="cuda", dtype=torch.bfloat16),
            "HI": torch.arange(tokens - queries, tokens, device="cuda").repeat(batch, 1),
        }
        for letter, role, planes in (("K", Role.KEY, keys), ("V", Role.VALUE, values)):
            fmt = schemes.parse(scheme).format(SlotSpec(K, D, torch.bfloat16, role))
            tensors |= plane_names(letter, planes, fmt)
        # What many rows attend to is masked otherwise than here.
        operands = Asked(scheme, scheme, tensors["Q"], keys, values, tensors["HI"][:1]) if queries == 1 else None
        found = []
        for job in jobs:
            config = job.config
            kernel = getattr(offline.load_module(job.source), offline.KERNEL)
            layout = offline.output_for(config, batch, queries)
            out = torch.empty(layout.size, dtype=layout.dtype, device="cuda")
            args = [*(tensors[name] for name in config.operands), out, keys[0].shape[0]]
            options = {"num_warps": config.tile.num_warps, "num_stages": config.tile.num_stages}
            try:
                handle = kernel[job.grid](*args, **options)
                error = relative_error(merged(out), operands) if operands and not config.direct else 0.0
                if not error < 1e-2:
                    print(scheme, config.tile, f"is wrong: relative error {error:.3g}", file=sys.stderr)
                    continue
                ms = graph_ms(lambda: kernel[job.grid](*args, **options), 3, 5)
            except Exception as error:
                print(scheme, config.tile, type(error).__name__, str(error)[:100], file=sys.stderr)
                continue
            found.append({
                "scheme": scheme, "batch": batch, "tokens": tokens, "queries": queries, "ms": ms, "splits": config.splits,
                "registers": handle.n_regs, "spills": handle.n_spills, "shared": handle.metadata.shared, **dataclasses.asdict(config.tile),
            })
        for row in sorted(found, key=lambda row: row["ms"])[:5]:
            names = ("block_t", "block_r", "num_warps", "num_stages", "copies", "picked", "splits", "registers", "spills")
            shown = {name: row[name] for name in names}
            print(scheme, batch, tokens, queries, f"{row['ms']:.4f}", *shown.values(), flush=True)
        rows += found
        del keys, values, tensors
        torch.cuda.empty_cache()
    return rows


def merged(out: torch.Tensor) -> torch.Tensor:
    """Partial results [splits, B, H, S, D + 2] as one."""
    acc, top, total = out[..., :-2], out[..., -2:-1], out[..., -1:]
    weight = torch.exp2(top - top.amax(0))
    return (acc * weight).sum(0) / (total * weight).sum(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--sweep", choices=("decode", "extend"), help="time the bare kernel over tiles")
    parser.add_argument("--quick", action="store_true", help="the two long shapes only")
    parser.add_argument("--shapes", help="batch x tokens, such as 1x131072,16x32768, in place of the usual ones")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="which, separated by semicolons")
    parser.add_argument("--twins", action="store_true", help="formats beside the schemes that they are options of")
    parser.add_argument("--mode", default=None, help="torch.compile's mode, e.g. max-autotune-no-cudagraphs")
    parser.add_argument("--extend", action="store_true", help="several new tokens, and prefill")
    parser.add_argument("--padding", type=int, default=0, help="tokens that a mask hides in the last row, fewer in each one before")
    parser.add_argument("--profile", type=int, help="kernel times at this many tokens")
    options = parser.parse_args()
    names = list(TWINS) if options.twins else options.schemes.split(";")
    if options.extend:
        measure_extend()
        return
    if options.profile:
        profile(options.profile, names)
        return
    shapes = SHAPES[:2] if options.quick else SHAPES
    if options.shapes:
        shapes = [tuple(int(part) for part in shape.split("x")) for shape in options.shapes.split(",")]
    if options.sweep == "decode":
        rows = sweep([decode_jobs(scheme, *shape) for shape in SHAPES[:2] for scheme in names])
    elif options.sweep == "extend":
        pasts = itertools.product(((512, 32768), (16, 32768)), ("dense", "int8", "int4"))
        rows = sweep([*(extend_jobs(scheme, *past) for past, scheme in pasts), extend_jobs("dense", 8192, 8192)])
    else:
        rows = measure(shapes, names, options.mode, options.padding)
    if options.json:
        text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
        pathlib.Path(options.json).write_text(text)
    if not options.sweep:
        show(rows)


if __name__ == "__main__":
    main()
