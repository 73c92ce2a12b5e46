"""Many new tokens over a long past, each chunk of it decoded once: the whole operation against SDPA, correctness first.

    python benchmarks/chunk_scratch.py [--json FILE] [--queries 512,2048,256,1024] [--schemes int8,int4] [--processes 12]

H=32 query heads, K=8 kv heads, D=128, bfloat16, T=32768 tokens. A row is one cut: tokens of a chunk (the scratch of keys and values is
4 KB a token), splits, tokens and rows of a tile, warps, stages. ``ms``: ``attend_chunks`` without the merge of its
splits; ``decode``: its first kernel alone, all chunks; ``x``: over the better SDPA backend. Then, for the cut that the lowering
chooses, ``compiled``: ``attend`` through Inductor, merge included. Times are medians over CUDA-graph replays.
What is off by more than 1% of the norm is not timed.
"""

# ruff: noqa: B023 - closures are timed within the iteration that makes them.

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import pathlib

import torch
from attention import D, DeviceStandIn, H, K, graph_ms, store
from chunked import TOKENS, job, sdpa

from kvcompile import schemes
from kvcompile.lowering import inductor
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend, attend_body
from kvcompile.lowering.prefill import chunked
from kvcompile.lowering.prefill.tiles import choose_cut, splits_for
from kvcompile.types import Role, SlotSpec, pages_for

SCHEMES = ("int8", "fp8", "int4", "kivi", "kivi(bits=4)")
CHUNKS = (8192, 16384, 32768)
TILES = ((64, 256, 8, 3), (64, 256, 8, 4), (128, 128, 8, 3), (64, 128, 8, 3), (64, 128, 8, 4))
CAPACITY, MULTIPROCESSORS, SHARED = TOKENS, 132, 232448


@dataclasses.dataclass(frozen=True)
class Cut:
    """One way to run one scheme."""

    scheme: str
    queries: int
    cut: tuple[int, ...]


def cuts(scheme: str, queries: int) -> list[Cut]:
    """The lowering's choice first, then the others."""
    found = []
    for chunk in CHUNKS:
        for tile in TILES:
            config = dataclasses.replace(job(scheme, queries, tile).config, chunk=chunk).over_scratch()
            splits = splits_for(config, queries * H // K, K, MULTIPROCESSORS, chunk)
            found.append(Cut(scheme, queries, (chunk, splits, *tile)))
    own = choose_cut(job(scheme, queries, TILES[0]).config, queries * H // K, 1, MULTIPROCESSORS, SHARED, CAPACITY)
    return sorted(found, key=lambda each: each.cut != own)


def arguments(cut: Cut, q: torch.Tensor, keys: list, values: list, hi: torch.Tensor) -> tuple:
    """What ``attend_chunks`` takes."""
    own = [schemes.parse(cut.scheme).for_role(role).spec() for role in Role]
    return AttendOperands(q, keys, values, hi, None, None, None, None, *own, D**-0.5, 0.0, D), list(cut.cut)


def empty_store(scheme: str, role: Role) -> list[torch.Tensor]:
    """The planes of ``store`` without memory."""
    made, slot = schemes.parse(scheme).for_role(role), SlotSpec(K, D, torch.bfloat16, role)
    specs = made.layout(slot).planes[: made.format(slot).planes]
    return [torch.empty(spec.shape(pages_for(TOKENS), 1, K), dtype=spec.dtype, device="meta") for spec in specs]


def compile_one(cut: Cut) -> str | None:
    """Fill triton's cache with the kernels of one cut."""
    from triton.runtime import driver

    driver.set_active(DeviceStandIn())
    q = torch.empty(1, H, cut.queries, D, device="meta", dtype=torch.bfloat16)
    hi = torch.empty(1, cut.queries, device="meta", dtype=torch.int64)
    _, found = chunked.launches(*arguments(cut, q, empty_store(cut.scheme, Role.KEY), empty_store(cut.scheme, Role.VALUE), hi))
    try:
        for launch in found[:2]:
            launch.kernel.warmup(*launch.arguments, grid=(1, 1, 1), num_warps=launch.warps, num_stages=launch.stages)
    except Exception as error:  # A tile that does not fit is a result.
        return f"{cut}: {type(error).__name__} {str(error)[:200]}"
    return None


def merged(partial: torch.Tensor) -> torch.Tensor:
    """Partial sums by log-sum-exp."""
    acc, m, total = partial[..., :-2], partial[..., -2:-1], partial[..., -1:]
    weight = torch.exp2(m - m.amax(0))
    return (acc * weight).sum(0) / (total * weight).sum(0)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of the first kv head's rows."""
    return ((found[:, : H // K].float() - exact).norm() / exact.norm()).item()


def measure(cut: Cut, q: torch.Tensor, keys: list, values: list, hi: torch.Tensor, exact: torch.Tensor) -> dict:
    """Error and times of one cut."""
    given = arguments(cut, q, keys, values, hi)
    row = {"scheme": cut.scheme, "queries": cut.queries, "cut": cut.cut}
    try:
        error = off(merged(chunked.attend_chunks(*given)), exact)
    except Exception as failure:  # A tile that does not fit is a result.
        return {**row, "error": f"{type(failure).__name__} {str(failure)[:100]}", "ms": None, "decode": None}
    if not error < 1e-2:
        return {**row, "error": error, "ms": None, "decode": None}
    _, found = chunked.launches(*given)

    def decode() -> None:
        for launch in found[::2]:
            launch.run()

    return {**row, "error": error, "ms": graph_ms(lambda: chunked.attend_chunks(*given), 4, 9), "decode": graph_ms(decode, 4, 9)}


def through_inductor(cut: Cut, q: torch.Tensor, keys: list, values: list, hi: torch.Tensor, exact: torch.Tensor) -> dict:
    """Error and time of ``attend`` as a compiled graph has it."""
    inductor.install()
    torch._dynamo.reset()
    own = [schemes.parse(cut.scheme).for_role(role).spec() for role in Role]

    def call(q: torch.Tensor, keys: list, values: list, hi: torch.Tensor) -> torch.Tensor:
        return attend(q, keys, values, hi, None, None, None, None, *own, D**-0.5, 0.0, D)

    compiled = torch.compile(call, fullgraph=True)
    # Inductor's cache knows nothing of our sources here.
    with torch._inductor.config.patch(force_disable_caches=True):
        error = off(compiled(q, keys, values, hi), exact)
    ms = graph_ms(lambda: compiled(q, keys, values, hi), 4, 9) if error < 1e-2 else None
    return {"scheme": f"{cut.scheme} compiled", "queries": cut.queries, "cut": (), "error": error, "ms": ms, "decode": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--queries", default="512,2048,256,1024")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="separated by commas outside of parentheses")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--compiled", action="store_true", help="only through Inductor, with the cut that the lowering chooses")
    options = parser.parse_args()
    every = [int(n) for n in options.queries.split(",")]
    names = options.schemes.split(",")
    todo = {(name, queries): cuts(name, queries) for queries in every for name in names}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        jobs = [] if options.compiled else [cut for found in todo.values() for cut in found]
        print(*filter(None, pool.map(compile_one, jobs, chunksize=4)), sep="\n", flush=True)
    planes = {name: (store(name, 1, TOKENS, Role.KEY), store(name, 1, TOKENS, Role.VALUE)) for name in names}
    rows = []
    with torch.no_grad():
        for queries in every:
            q = torch.randn(1, H, queries, D, device="cuda", dtype=torch.bfloat16)
            hi = torch.arange(TOKENS - queries, TOKENS, device="cuda").unsqueeze(0)
            dense = sdpa(q)
            print(*(f"{row['scheme']} S={queries} {row['ms']:.4f}" for row in dense), sep="\n", flush=True)
            best = min(row["ms"] for row in dense)
            rows += dense
            for name, (keys, values) in planes.items():
                one = slice(0, 1)
                exact = attend_body(AttendOperands(
                    q[:, : H // K].float(), [plane[:, :, one] for plane in keys], [plane[:, :, one] for plane in values], hi, None, None,
                    None, None, *(schemes.parse(name).for_role(role).spec() for role in Role), D**-0.5, 0.0, D,
                ))
                found = [] if options.compiled else [measure(cut, q, keys, values, hi, exact) for cut in todo[name, queries]]
                found.append(through_inductor(todo[name, queries][0], q, keys, values, hi, exact))
                for row in found:
                    row["x"] = row["ms"] and row["ms"] / best
                    print(*(f"{value:.4f}" if isinstance(value, float) else value for value in row.values()), flush=True)
                rows += found
                if options.json:
                    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
                    options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
