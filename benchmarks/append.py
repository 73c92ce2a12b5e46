"""Appending to one layer's keys and values, as Inductor compiles it: one token, and a block of 8192.

    python benchmarks/append.py [--json FILE] [--schemes int8,int4,kivi] [--tokens 1,8192] [--traced]

K=8 kv heads, D=128, bfloat16, B=1; medians over CUDA-graph replays. "Roof": the new keys and values read and their codes
written, at 4.3 TB/s. What was written is compared with the eager body's first. ``--traced`` leaves one token's append to a
window to Inductor as well, where compiled graphs take the kernel of ``triton_append``.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

import torch
from attention import BANDWIDTH, D, K, graph_ms
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile import schemes
from kvcompile.lowering.ops import append_body
from kvcompile.lowering.triton_append import append_window_cuda
from kvcompile.lowering.windows import append_window_body
from kvcompile.types import Role, SlotSpec, pages_for

CAPACITY = 32768


def planes_of(scheme: str, role: Role) -> list[torch.Tensor]:
    """An empty store."""
    layout = schemes.parse(scheme).of(role).layout(SlotSpec(K, D, torch.bfloat16, role))
    return [torch.zeros(plane.shape(pages_for(CAPACITY), 1, K), dtype=plane.dtype, device="cuda") for plane in layout.planes]


def measure(scheme: str, tokens: int, traced: bool) -> dict:
    """Microseconds of both appends, kernels that Inductor made of them, and the roof."""
    made = schemes.parse(scheme)
    spelled = [made.of(role).spell() for role in Role]
    stores = [planes_of(scheme, role) for role in Role]
    # As projections lay them: [B, S, K, D] seen as [B, K, S, D].
    new = [torch.randn(1, tokens, K, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in Role]
    pos = torch.arange(tokens, device="cuda").unsqueeze(0)

    def both(append_window: Any, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        recent = []
        halves = list(planes[: len(stores[0])]), list(planes[len(stores[0]) :])
        for x, half, text in zip((keys, values), halves, spelled, strict=True):
            if made.window:
                recent.append(append_window(x, half, pos, None, text)[0])
            else:
                append_body(x, half, pos, text)
        return recent

    from torch._inductor.utils import run_and_get_code

    arguments = (*new, pos, *stores[0], *stores[1])
    written = functools.partial(both, append_window_body if traced else append_window_cuda)
    run = torch.compile(make_fx(written)(*(x.clone() for x in arguments)))
    expected = [x.clone() for x in arguments]
    both(append_window_body, *expected)
    _, sources = run_and_get_code(run, *arguments)
    wrong = [index for index, (x, y) in enumerate(zip(arguments, expected, strict=True)) if (x != y).float().mean() > 1e-4]
    size = sum(
        tokens * K * D * 2 + tokens * made.of(role).layout(SlotSpec(K, D, torch.bfloat16, role)).bytes_per_token(K) for role in Role
    )
    row = {"scheme": scheme, "tokens": tokens, "kernels": sources[0].count(".run("), "roof_us": size / BANDWIDTH * 1e6}
    return {**row, "us": None if wrong else graph_ms(lambda: run(*arguments)) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--schemes", default="int8,fp8,int4,kivi")
    parser.add_argument("--tokens", default="1,8192")
    parser.add_argument("--traced", action="store_true")
    options = parser.parse_args()
    rows = []
    for scheme in options.schemes.split(","):
        for tokens in (int(n) for n in options.tokens.split(",")):
            rows.append(measure(scheme, tokens, options.traced))
            print(*rows[-1].values(), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
