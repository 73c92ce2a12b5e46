"""One new token over a long past in the Gluon kernel, beside the Triton template and SDPA; correctness first.

    python benchmarks/gluon_attend.py [--schemes "int4;kivi(bits=2)"] [--shapes 1x131072,16x32768] [--limit SECONDS] [--padding N]
        [--merges 4x32x64,8x8x256+] [--splits 132,198]

``--merges``: both launches with other merges, each WARPSxCHANNELSxSLOTS, + where it overlaps the kernel. ``--splits``: with other
numbers of splits of codes. ``--padding``: as in ``attention.py``.

H=32 query heads, K=8 kv heads, D=128, bfloat16; medians over CUDA-graph replays, so launches are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent)]

import attention as bench

from kvcompile.lowering.gluon.config import Merge
from kvcompile.lowering.gluon.launch import Launch, device_of, launches, operation
from kvcompile.lowering.ops.kept_tokens import kept_tokens
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body

MANY = 1 << 20
"""Multiprocessors that limit no number of splits."""

SHAPES = "1x131072,16x32768,1x32768,1x8192,1x1024"


def merge_of(text: str) -> Merge:
    """A merge as the command line spells it."""
    warps, channels, slots = map(int, text.rstrip("+").split("x"))
    return Merge(warps, channels, slots, text.endswith("+"))


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of what differs, of that of what is wanted."""
    return float(((found.float() - wanted).norm() / wanted.norm()).item())


def both_ms(found: tuple[Launch, Launch]) -> float:
    """Median time of the kernel and its merge."""

    def run() -> None:
        for launch in found:
            launch.run()

    return bench.graph_ms(run)


def measure(scheme: str, batch: int, tokens: int, dense: float, merges: list[str], splits: list[int], padding: int) -> str:
    """One row of the table, and one for each merge and number of splits."""
    call, asked, size = bench.attend_call(scheme, batch, tokens, None, padding)
    _, spelled, q, keys, values, hi, exact_newest, base, *_, keep = asked
    given = (q, keys, values, hi, None, keep, None, spelled, spelled, bench.D**-0.5, bench.D, exact_newest, base)
    # A graph counts what its mask keeps once for all layers.
    kept = None if keep is None else kept_tokens(keep)

    def gluon() -> torch.Tensor:
        return operation(*given, kept)

    found, template = gluon(), call()
    wanted = template.float()
    if batch * tokens <= 131072:
        exact = AttendOperands(
            q.float(), keys, values, hi, None, keep, None, None, spelled, spelled, bench.D**-0.5, 0.0, bench.D, exact_newest, base
        )
        wanted = attend_body(exact)
    error = error_of(found, wanted)
    if not error < 1e-2:
        return f"  {scheme} WRONG: error {error:.2e}"
    whole, other = bench.graph_ms(gluon), bench.graph_ms(call)
    exact = AttendOperands(*given[:6], None, None, spelled, spelled, bench.D**-0.5, 0.0, bench.D, exact_newest, base)
    device = device_of(q.device)
    _, (attend, _) = launches(exact, device, kept=kept)
    alone = bench.graph_ms(attend.run)
    rows = []
    for name in merges:
        out, made = launches(exact, device, merging=merge_of(name))
        time_ms = both_ms(made)
        rows.append(f"    merge {name}: {time_ms:.4f} ms {dense / time_ms:.2f}x error {error_of(out, wanted):.1e}")
    for count in splits:
        out, made = launches(exact, dataclasses.replace(device, multiprocessors=MANY), count)
        time_ms, one_ms = both_ms(made), bench.graph_ms(made[0].run)
        rows.append(f"    {made[0].grid[0]} programs a head: {time_ms:.4f} ms (kernel {one_ms:.4f}) error {error_of(out, wanted):.1e}")
    row = (
        f"  {scheme}: {whole:.4f} ms {dense / whole:.2f}x of roof {size / bench.BANDWIDTH * 1e3 / whole:.0%} error {error:.1e}"
        f" (kernel {alone:.4f}, {attend.grid[0]} splits); template {other:.4f} ms {dense / other:.2f}x"
    )
    return "\n".join([row, *rows])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="int4;kivi(bits=2)")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--merges", default="")
    parser.add_argument("--splits", default="")
    parser.add_argument("--padding", type=int, default=0, help="tokens that a mask hides in the last row, fewer in each one before")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    merges, splits = (list(filter(None, text.split(","))) for text in (options.merges, options.splits))
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
                print(measure(scheme, batch, tokens, dense, merges, [*map(int, splits)], options.padding), flush=True)
            except Exception as error:
                print(f"  {scheme} FAILED {type(error).__name__} {str(error)[:300]}", flush=True)
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
