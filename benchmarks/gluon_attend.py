"""One new token over a long past in the Gluon kernel, beside the Triton template and SDPA; correctness first.

    python benchmarks/gluon_attend.py [--schemes "int4;kivi(bits=2)"] [--shapes 1x131072,16x32768] [--limit SECONDS]

H=32 query heads, K=8 kv heads, D=128, bfloat16; medians over CUDA-graph replays, so launches are not counted.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent)]

import attention as bench

from kvcompile.lowering.gluon.launch import launches, operation
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body

SHAPES = "1x131072,16x32768,1x32768,1x8192,1x1024"


def measure(scheme: str, batch: int, tokens: int, dense: float) -> str:
    """One row of the table."""
    call, asked, size = bench.attend_call(scheme, batch, tokens, None)
    _, spelled, q, keys, values, hi, recent, base, *_ = asked
    given = (q, keys, values, hi, None, None, None, spelled, spelled, bench.D**-0.5, bench.D, recent, base)

    def gluon() -> torch.Tensor:
        return operation(*given)

    found, template = gluon(), call()
    wanted = template.float()
    if batch * tokens <= 131072:
        exact = AttendOperands(q.float(), keys, values, hi, *[None] * 4, spelled, spelled, bench.D**-0.5, 0.0, bench.D, recent, base)
        wanted = attend_body(exact)
    error = ((found.float() - wanted).norm() / wanted.norm()).item()
    if not error < 1e-2:
        return f"  {scheme} WRONG: error {error:.2e}"
    whole, other = bench.graph_ms(gluon), bench.graph_ms(call)
    exact = AttendOperands(*given[:6], None, None, spelled, spelled, bench.D**-0.5, 0.0, bench.D, recent, base)
    _, (attend, _) = launches(exact, torch.cuda.get_device_properties(0).multi_processor_count)
    alone = bench.graph_ms(attend.run)
    return (
        f"  {scheme}: {whole:.4f} ms {dense / whole:.2f}x of roof {size / bench.BANDWIDTH * 1e3 / whole:.0%} error {error:.1e}"
        f" (kernel {alone:.4f}, {attend.grid[0]} splits); template {other:.4f} ms {dense / other:.2f}x"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="int4;kivi(bits=2)")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    started = time.time()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for batch, tokens in (map(int, shape.split("x")) for shape in options.shapes.split(",")):
        from torch.nn.attention import SDPBackend

        both = [bench.sdpa_ms(batch, tokens, each) for each in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]
        dense = min(each for each in both if each is not None)
        print(f"B={batch} T={tokens} SDPA {dense:.4f} ms", flush=True)
        for scheme in options.schemes.split(";"):
            if time.time() - started > options.limit:
                return
            try:
                print(measure(scheme, batch, tokens, dense), flush=True)
            except Exception as error:
                print(f"  {scheme} FAILED {type(error).__name__} {str(error)[:300]}", flush=True)
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
