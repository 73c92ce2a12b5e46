"""Many new tokens over a long past: the prefill kernel by scheme and tile against SDPA, correctness first.

    python benchmarks/chunked.py [--json FILE] [--queries 512,128,2048] [--schemes dense,int8] [--processes 12]

H=32 query heads, K=8 kv heads, D=128, bfloat16, T=32768 tokens, the bare kernel without the merge of its splits. Times are
medians over CUDA-graph replays. A kernel whose output is off by more than 1% of the norm is not timed.
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

from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import Tile
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.lowering.prefill import offline as prefill_offline
from kvcompile.lowering.prefill.config import PrefillConfig, normalized
from kvcompile.lowering.prefill.tiles import splits_for
from kvcompile.types import PAGE, Role, SlotSpec

TOKENS = 32768
SCHEMES = ("dense", "int8", "fp8", "int4", "kivi", "kivi(bits=4)")
TILES = ((64, 256, 8, 3), (128, 128, 8, 3), (64, 128, 8, 3), (64, 128, 4, 3), (64, 256, 16, 2))


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel to time."""

    scheme: str
    queries: int
    config: PrefillConfig

    @property
    def source(self) -> str:
        return prefill_offline.prefill_source(self.config, 1, self.queries)


def job(scheme: str, queries: int, tile: tuple[int, int, int, int]) -> Job:
    """A kernel with as many splits as the lowering would choose on an H200."""
    own = [schemes.parse(scheme).for_role(role) for role in Role]
    words = [made.format(SlotSpec(K, D, torch.bfloat16, role)).word_dtype for made, role in zip(own, Role, strict=True)]
    block_t, block_r, warps, stages = tile
    config = PrefillConfig(
        own[0].spec(), own[1].spec(), D, D, K, H // K, torch.bfloat16, words[0], words[1], D**-0.5,
        tile=Tile(block_t, block_r, False, warps, stages),
    )
    return Job(scheme, queries, config.with_splits(splits_for(config, queries * H // K, K, 132, TOKENS)))


def compile_one(job: Job) -> str | None:
    """Fill triton's cache with one kernel."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    driver.set_active(DeviceStandIn())
    config, kernel = job.config, getattr(offline.load_module(job.source), offline.KERNEL)
    operands, out = prefill_offline.operands_for(config, 1, job.queries), prefill_offline.output_for(config, 1, job.queries)
    tensors = [MockTensor(operands[name].dtype) for name in config.operands] + [MockTensor(out.dtype)]
    try:
        kernel.warmup(
            *tensors, TOKENS // PAGE, grid=(1, 1, 1), num_warps=config.tile.num_warps, num_stages=config.tile.num_stages
        )
    except Exception as error:  # A tile that does not fit is a result.
        return f"{job.scheme} {config.tile}: {type(error).__name__} {str(error)[:200]}"
    return None


def reference(q: torch.Tensor, keys: list, values: list, hi: torch.Tensor, config: PrefillConfig) -> torch.Tensor:
    """The first kv head's result in float32."""
    one = slice(0, 1)
    return attend_body(AttendOperands(
        q[:, : H // K].float(), [plane[:, :, one] for plane in keys], [plane[:, :, one] for plane in values], hi, None, None, None, None,
        config.key_scheme, config.value_scheme, D**-0.5, 0.0, D,
    ))


def measure(job: Job, q: torch.Tensor, keys: list, values: list, hi: torch.Tensor, exact: torch.Tensor) -> dict:
    """Time and error of one kernel."""
    config, tile = job.config, job.config.tile
    small, scales = normalized(q)
    tensors = {"Q": small if config.slots[0].scaled else q, "Q_SCALES": scales, "HI": hi, "K_WORDS": keys[0], "V_WORDS": values[0]}
    for letter, planes in (("K", keys), ("V", values)):
        tensors |= dict(zip((f"{letter}_SCALES", f"{letter}_ZEROS"), planes[1:], strict=False))
    layout = prefill_offline.output_for(config, 1, job.queries)
    out = torch.empty(layout.size, dtype=layout.dtype, device="cuda")
    kernel = getattr(offline.load_module(job.source), offline.KERNEL)
    args = [*(tensors[name] for name in config.operands), out, TOKENS // PAGE]
    grid = (-(-job.queries * H // K // tile.block_r), K, config.splits)

    def call() -> object:
        return kernel[grid](*args, num_warps=tile.num_warps, num_stages=tile.num_stages)

    handle = call()
    found = out.float()
    if not config.direct:
        acc, m, total = out[..., :-2], out[..., -2:-1], out[..., -1:]
        weight = torch.exp2(m - m.amax(0))
        found = (acc * weight).sum(0) / (total * weight).sum(0)
    error = ((found[:, : H // K] - exact).norm() / exact.norm()).item()
    row = {"scheme": job.scheme, "queries": job.queries, "splits": config.splits, "error": error, **dataclasses.asdict(tile)}
    if not error < 1e-2:
        return {**row, "ms": None}
    return {**row, "ms": graph_ms(call, 4, 9), "registers": handle.n_regs, "spills": handle.n_spills, "shared": handle.metadata.shared}


def sdpa(q: torch.Tensor) -> list[dict]:
    """Dense SDPA over as many tokens, no mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    k, v = (torch.randn(1, K, TOKENS, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            ms = graph_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), 4, 9)
        rows.append({"scheme": f"SDPA {backend.name}", "queries": q.shape[2], "ms": ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--queries", default="512,128,2048")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    jobs = [job(scheme, int(n), tile) for n in options.queries.split(",") for scheme in options.schemes.split(",") for tile in TILES]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        print(*filter(None, pool.map(compile_one, jobs, chunksize=1)), sep="\n", flush=True)
    planes = {scheme: (store(scheme, 1, TOKENS, Role.KEY), store(scheme, 1, TOKENS, Role.VALUE)) for scheme in options.schemes.split(",")}
    rows = []
    for queries in (int(n) for n in options.queries.split(",")):
        q = torch.randn(1, H, queries, D, device="cuda", dtype=torch.bfloat16)
        hi = torch.arange(TOKENS - queries, TOKENS, device="cuda").unsqueeze(0)
        rows += sdpa(q)
        for scheme, (keys, values) in planes.items():
            mine = [job for job in jobs if job.scheme == scheme and job.queries == queries]
            exact = reference(q, keys, values, hi, mine[0].config)
            rows += [measure(job, q, keys, values, hi, exact) for job in mine]
    for row in sorted(rows, key=lambda row: (row["queries"], row["scheme"], row["ms"] or 0)):
        print(*row.values())
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
