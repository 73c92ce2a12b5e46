"""What ``certify=Certify(fallback="report")`` costs and says over schemes without originals: one layer's decode steps, correctness first.

    python benchmarks/extensions/certified/certified_report.py [--json FILE] [--tokens 4096,32768] [--schemes int8,int4,fp8,kivi]
            [--mode reduce-overhead]

32 query heads over 8 kv heads of 128 channels, bfloat16, one row: the layer is compiled without and with a report, filled with random
tokens, and decodes one token a call. For each scheme: whether every output is the same bit for bit, errors of head-steps (from float64
attention over the original keys and values) beside what was reported, mean and largest, and median milliseconds of a step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import kvcompile
from kvcompile.schemes.certificate.policy import Certify, Fallback

H, K, D, WIDTH, STEPS, WARM = 32, 8, 128, 256, 24, 4


class Layer(nn.Module):
    """Attention over a static cache."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, (H + 2 * K) * D)
        self.register_buffer("keys", torch.zeros(1, K, capacity, D))
        self.register_buffer("values", torch.zeros(1, K, capacity, D))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        mask = torch.arange(self.keys.shape[2], device=x.device) <= pos[:, None]
        return sdpa(q, self.keys, self.values, attn_mask=mask, enable_gqa=True), q, k, v


def decoded(scheme: str, certify: Certify | None, tokens: int, arguments: argparse.Namespace) -> tuple[list[Any], float, Any]:
    """What every step gave, the median milliseconds of one, and the telemetry."""
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens + STEPS, WIDTH, generator=draw).to(arguments.device, torch.bfloat16)
    backend = kvcompile.backend(scheme, certify=certify, strict=True, mode=arguments.mode)
    layer = Layer(tokens + STEPS).to(arguments.device, torch.bfloat16)
    run, given, times = torch.compile(layer, backend=backend, fullgraph=True), [], []

    def call(first: int, count: int) -> None:
        pos = torch.arange(first, first + count, device=arguments.device)
        _wait(arguments.device)
        started = time.perf_counter()
        made = run(x[:, first : first + count], pos)
        _wait(arguments.device)
        times.append((time.perf_counter() - started) * 1e3)
        given.append([each.clone() for each in made])

    with torch.no_grad():
        call(0, tokens)
        for at in range(tokens, tokens + STEPS):
            call(at, 1)
    return given, statistics.median(times[1 + WARM :]), backend.telemetry()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def errors(given: list[Any]) -> torch.Tensor:
    """How far each decoded head-step is from float64 attention over the original keys and values, [steps, H]."""
    k, v = (torch.cat([made[index] for made in given], 2).double() for index in (2, 3))
    first, found = given[0][2].shape[2], []
    for at, (output, q, _, _) in enumerate(given[1:], start=first + 1):
        exact = sdpa(q.double(), k[:, :, :at], v[:, :, :at], enable_gqa=True)
        found.append(torch.linalg.vector_norm(output.double() - exact, dim=-1).flatten())
    return torch.stack(found)


def measured(scheme: str, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one scheme at one length."""
    plain, plain_ms, _ = decoded(scheme, None, tokens, arguments)
    given, ms, telemetry = decoded(scheme, Certify(fallback=Fallback.REPORT), tokens, arguments)
    same = all(torch.equal(a[0], b[0]) for a, b in zip(plain, given, strict=True))
    error, most = errors(given), sum(telemetry[f"most_{name}"] for name in ("key", "value", "arithmetic"))
    mean = sum(telemetry[f"sum_{name}"] for name in ("key", "value", "arithmetic")) / telemetry["head_steps"]
    assert telemetry["head_steps"] == STEPS * H
    assert float(error.max()) <= most
    assert float(error.mean()) <= mean
    return {
        "scheme": scheme, "tokens": tokens, "same": same, "error_mean": float(error.mean()), "bound_mean": mean,
        "error_most": float(error.max()), "bound_most": most, "arithmetic_most": telemetry["most_arithmetic"],
        "ms_plain": plain_ms, "ms_reported": ms,
    }


def main() -> None:
    """Print a line for each scheme and length; exit with an error where a report changes an output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,32768")
    parser.add_argument("--schemes", default="int8,int4,fp8,kivi")
    parser.add_argument("--mode", default=None, help="of Inductor, such as reduce-overhead")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for scheme in arguments.schemes.split(","):
            rows.append(measured(scheme, tokens, arguments))
            print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in rows[-1].items()),
                  flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(0 if all(row["same"] for row in rows) else 1)


if __name__ == "__main__":
    main()
