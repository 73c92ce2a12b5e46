"""Appending to one layer's keys and values in a compiled graph: one token, a block of 8192, and a step that completes a block.

    python benchmarks/append.py [--json FILE] [--schemes int8,fp8,int4,kivi] [--tokens 1,8192] [--traced]

K=8 kv heads, D=128, bfloat16, B=1; medians over CUDA-graph replays. "Roof": the new keys and values read and their codes
written, at 4.3 TB/s; "x" is the time over it. What was written is compared with the eager body's first, bit for bit. "Flush": one
token that makes a window's block whole, against one in the middle of a block, as a ratio. ``--traced`` leaves everything to
Inductor, where compiled graphs take kernels of our own. "Compile": seconds of the first compilation of a shape, which a prefill
pays once a layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
from attention import BANDWIDTH, D, K, graph_ms
from graphs import compiled

from kvcompile import schemes
from kvcompile.lowering import compile as lowering
from kvcompile.lowering.append import appends
from kvcompile.lowering.ops import operations as ops
from kvcompile.types import Role, SlotSpec, pages_for

CAPACITY = 32768


def planes_of(scheme: str, role: Role, device: str = "cuda") -> list[torch.Tensor]:
    """An empty store."""
    layout = schemes.parse(scheme).for_role(role).layout(SlotSpec(K, D, torch.bfloat16, role))
    return [torch.zeros(plane.shape(pages_for(CAPACITY), 1, K), dtype=plane.dtype, device=device) for plane in layout.planes]


def both(scheme: str, window: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """A step's two appends: new keys, new values, positions and all planes to the newest tokens, by the operations or their bodies."""
    spelled = [schemes.parse(scheme).for_role(role).spec() for role in Role]

    def run(keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        halves = list(planes[: len(planes) // 2]), list(planes[len(planes) // 2 :])
        given = []
        for x, half, text in zip((keys, values), halves, spelled, strict=True):
            if schemes.parse(scheme).window:
                given.append(window(x, half, pos, None, text)[0])
            else:
                plain(x, half, pos, text)
        return given

    return run


def compiled_step(scheme: str, arguments: list[torch.Tensor]) -> tuple[Callable[..., Any], str]:
    """The compiled step and Inductor's module."""
    from torch._inductor.utils import run_and_get_code

    run, sources = run_and_get_code(compiled, both(scheme, ops.append_window, ops.append), arguments)
    return run, "\n".join(sources)


def differences(scheme: str, run: Callable[..., Any], arguments: list[torch.Tensor]) -> int:
    """Elements of planes and results that are not what the eager bodies give; ``arguments`` hold what was written then."""
    expected = [x.clone() for x in arguments]
    wanted = both(scheme, ops.append_window_body, ops.append_body)(*expected)
    found = run(*arguments)
    pairs = zip((*arguments, *found), (*expected, *wanted), strict=True)
    return sum(int(((x != y) & ~(x.isnan() & y.isnan())).sum()) for x, y in pairs)


def measure(scheme: str, tokens: int) -> dict[str, Any]:
    """Microseconds of both appends, kernels in the graph, elements that are wrong, the roof, and what a flush costs."""
    made = schemes.parse(scheme)
    # As projections lay them: [B, S, K, D] seen as [B, K, S, D].
    new = [torch.randn(1, tokens, K, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in Role]
    pos = torch.arange(tokens, device="cuda").unsqueeze(0)
    arguments = [*new, pos, *planes_of(scheme, Role.KEY), *planes_of(scheme, Role.VALUE)]
    begun = time.perf_counter()
    run, source = compiled_step(scheme, arguments)
    took = time.perf_counter() - begun
    wrong = differences(scheme, run, arguments)
    size = sum(
        tokens * K * D * 2 + tokens * made.for_role(role).layout(SlotSpec(K, D, torch.bfloat16, role)).bytes_per_token(K) for role in Role
    )
    us, roof = graph_ms(lambda: run(*arguments)) * 1e3, size / BANDWIDTH * 1e6
    row = {
        "scheme": scheme, "tokens": tokens, "kernels": source.count(".run("), "wrong": wrong, "us": us, "roof_us": roof, "x": us / roof,
        "share": roof / us, "compile_s": took,
    }
    if not made.window or tokens > 1:
        return row
    block = made.for_role(Role.KEY).block
    steps = []
    for at in (block // 2, block - 1):
        step = [*new, torch.full_like(pos, at), *arguments[3:]]
        steps.append(graph_ms(lambda step=step: run(*step)) * 1e3)
    return {**row, "middle_us": steps[0], "flush_us": steps[1], "flush": steps[1] / steps[0]}


def main() -> None:
    """Print one row a scheme and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--schemes", default="int8,fp8,int4,kivi")
    parser.add_argument("--tokens", default="1,8192")
    parser.add_argument("--traced", action="store_true")
    options = parser.parse_args()
    if options.traced:
        lowering.ON_CUDA = lowering.BODIES
        appends.pair = lambda graph: None
    rows = []
    for scheme in options.schemes.split(","):
        for tokens in (int(n) for n in options.tokens.split(",")):
            rows.append(measure(scheme, tokens))
            texts = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in rows[-1].items())
            print(*texts, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
