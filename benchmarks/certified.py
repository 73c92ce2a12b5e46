"""One new token of certified attention by its kernels: whole, by phases, and against the scheme ``dense``; correctness first.

    python benchmarks/certified.py [--json FILE] [--tokens 8192,65536,131072] [--policy SPELLING] [--tier2 device,host] [--sharp X]
                                   [--scratch 0,4] [--drift 1,0.99,0.9]

H=32 query heads, K=8 kv heads, D=128, bfloat16, one row. Times are medians over CUDA-graph replays of what Inductor makes of one layer's
attention. Phases are the device times of its kernels as torch's profiler sees them: those of ``kernels.certified`` by name, and
"algebra", everything that Inductor made. ``host``: the originals lie in pinned host memory, which the kernels read where they are.

``--scratch``: slots of every 16 blocks of host keys that are kept on the device (``certified(tier2=host, scratch=4)``). What that saves
depends on the queries, so each row says which: ``--drift 1`` is the same query at every step, where everything is found from the second on;
R below 1 is q = R q + sqrt(1 - R^2) noise before every step, noise that is new in every replay. The time of making it alone is taken
from that of both; phases are without it. Hit rate and bytes of keys over the bus are the telemetry's, over the timed steps and those
before them.

``--dense-step`` takes the ms of a whole dense step at each length (from benchmarks/step.py); the ratio of steps of 32 layers is then
reported, which may be 1.3. Random keys spread attention over everything; ``--sharp`` multiplies the queries.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention import attend_call, graph_ms
from benchmarks.certified_soundness import Cache, Step, by_kernels, distance, returned
from kvcompile.lowering.certificate.telemetry import Telemetry
from kvcompile.lowering.certified.site_op import certified_site
from kvcompile.lowering.compile import compile_graph
from kvcompile.runtime.pinned import host_plane
from kvcompile.schemes.certificate.policy import Certify, Count, parse_policy
from kvcompile.schemes.certificate.telemetry import TELEMETRY
from kvcompile.schemes.certified import BLOCK, SET
from kvcompile.settings import Settings
from kvcompile.types import PAGE

H, K, D, LAYERS = 32, 8, 128, 32
PHASES = {
    **{name: name for name in (
        "key_scores", "select_blocks", "stage_keys", "exact_scores", "bound_sums", "weighted_values", "certify", "finalize",
    )},
    "dense_scores": "exact_scores", "bound_value_sums": "bound_sums", "weighted_originals": "weighted_values",
    "dense_values": "weighted_values",
}
"""The phase of a step that each kernel belongs to."""


def step_of(tokens: int, policy: Certify, tier2: str, sharp: float) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """A step over random keys and values, the newest 17 of which are in the window as after one append."""
    draw = torch.Generator("cuda").manual_seed(tokens)
    length = tokens - 8
    q = (torch.randn(1, H, 1, D, generator=draw, device="cuda") * sharp).to(torch.bfloat16)
    k, v = (torch.randn(1, K, length, D, generator=draw, device="cuda").to(torch.bfloat16) for _ in range(2))
    cache = Cache.of(k, v, poison=False)
    cache.recent = [x[:, :, -17:].contiguous() for x in (k, v)]
    cache.base = torch.tensor([length - 17], device="cuda")
    if tier2 == "host":
        cache.originals = [host_plane(plane.shape, plane.dtype, plane.device).copy_(plane) for plane in cache.originals]
    return Step(q, cache, D**-0.5, policy), k, v


def operands(step: Step, slots: int = 0) -> list[Any]:
    """Return the operands of ``kvcompile::certified_site``; with ``slots`` an empty scratch."""
    cache, spelled = step.cache, f"certified(certify={step.policy.spell()})"
    telemetry = torch.zeros(1, 1, K, 1, TELEMETRY, dtype=torch.float64, device="cuda")
    given = [
        step.q, [*cache.keys, cache.originals[0]], [*cache.values, cache.originals[1]], step.hi, None, None, None, None, spelled, spelled,
        step.scale, 0.0, D, cache.recent, cache.base, telemetry,
    ]
    if not slots:
        return given
    pages = cache.keys[0].shape[0]
    places = torch.zeros(pages, 1, K, PAGE // BLOCK, 2, dtype=torch.int32, device="cuda")
    return [*given, places, torch.zeros(pages, 1, K, slots * PAGE // SET, D, dtype=step.q.dtype, device="cuda")]


class Drift:
    """A query that goes on a little with every step."""

    def __init__(self, q: torch.Tensor, rho: float) -> None:
        self.q, self.rho, self.now = q, rho, q.float()
        self.size = float(q.float().std())

    def __call__(self) -> None:
        if self.rho < 1:
            self.now.mul_(self.rho).add_(torch.randn_like(self.now), alpha=self.size * math.sqrt(1 - self.rho**2))
            self.q.copy_(self.now)

    def title(self) -> str:
        """What the queries are, in words."""
        return "the same query at every step" if self.rho == 1 else f"q = {self.rho} q + noise before every step"


def compiled_site(given: list[Any], mode: str | None = None) -> Callable[[], torch.Tensor]:
    """One layer's certified attention in a graph that is compiled as a rewritten model is."""
    graph, fake_mode = torch.fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    names = {id(x): graph.placeholder(f"operand{index}") for index, x in enumerate(tensors)}
    fakes = [fake_mode.from_tensor(x, static_shapes=True) for x in tensors]
    for node, fake in zip(names.values(), fakes, strict=True):
        node.meta["example_value"] = fake
    graph.output((graph.call_function(certified_site, tuple(tree_map_only(torch.Tensor, lambda x: names[id(x)], given))),))
    run = compile_graph(torch.fx.GraphModule({}, graph), fakes, fake_mode, Settings(), mode=mode)
    return lambda: run(*tensors)[0]


def phases(call: Any, steps: int = 10) -> dict[str, float]:
    """Device ms a step by kernel, and how many kernels a step has."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = collections.defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = PHASES.get(event.name, "algebra")
            found[name] += event.device_time / steps / 1e3
            found["kernels"] += 1 / steps
    return dict(found)


def measure(tokens: int, policy: Certify, tier2: str, sharp: float, dense_ms: float, slots: int, rho: float) -> dict[str, Any]:
    """One row; ends the benchmark where a result is not within its certificate."""
    step, k, v = step_of(tokens, policy, tier2, sharp)
    given = operands(step, slots)
    run, drift = compiled_site(given), Drift(step.q, rho)

    def checked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Error, certificate and counters of the query as it is."""
        _, figures, counts = step.run(by_kernels)
        error, bound = distance(run(), step.exact(k, v)), returned(figures)
        if not (error <= 1.01 * bound + 1e-6).all():
            worst = f"{error.max():.3g} against {bound.max():.3g}"
            raise SystemExit(f"certified at {tokens} tokens is beyond its certificate: {worst}; no times")
        return error, bound, counts

    def both() -> None:
        drift()
        run()

    error, bound, counts = checked()
    ms = graph_ms(both) - (graph_ms(drift) if rho < 1 else 0.0)
    told, by_phase = Telemetry.of([given[15]]), phases(run)
    checked()
    blocks = counts[..., Count.BLOCKS].sum().item()
    read = (counts[..., Count.KEYS] + counts[..., Count.EXPLORED]).sum().item()
    originals = (counts[..., Count.VALUES] + counts[..., Count.EXPLORED]).sum().item()
    row = {
        "tokens": tokens, "tier2": tier2, "policy": policy.spell(), "sharp": sharp, "ms": ms, "dense_ms": dense_ms, "ratio": ms / dense_ms,
        "phases_ms": by_phase, "keys_share": read / blocks, "values_share": originals / blocks,
        "rungs": torch.bincount(counts[..., Count.RUNG].flatten().long(), minlength=5).tolist(),
        "certificate_mean": bound.mean().item(), "error_mean": error.mean().item(),
        "tier1_bytes": sum(plane.nbytes for plane in (*step.cache.keys, *step.cache.values)),
        "tier2_bytes_read_at_most": (read + originals) * 16 * D * 2, "scratch": slots, "drift": rho, "queries": drift.title(),
        "fallen": (told["rung_head"] + told["rung_layer"]) / told["head_steps"],
    }
    if slots:
        steps = told["steps"] / K
        row["scratch_hits"] = told["scratch"] / max(1.0, told["scratch"] + told["fetched"])
        row["host_key_bytes_a_step"] = told["fetched"] / steps * BLOCK * D * 2
        row["scratch_bytes"] = given[16].nbytes + given[17].nbytes
    return row


def variants(options: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """Where tier 2 is, the slots of its scratch, how queries go on."""
    for tier2 in options.tier2.split(","):
        for slots in map(int, options.scratch.split(",")) if tier2 == "host" else (0,):
            for rho in map(float, options.drift.split(",")) if slots else (1.0,):
                yield tier2, slots, rho


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="8192,65536,131072")
    parser.add_argument("--policy", action="append", help="as Certify.spell writes it; may be given more than once")
    parser.add_argument("--tier2", default="device,host")
    parser.add_argument("--scratch", default="0,4", help="slots for each 16 blocks, where tier 2 is on the host")
    parser.add_argument("--drift", default="1,0.99,0.9", help="how much of a query the next one has, where there is a scratch")
    parser.add_argument("--sharp", type=float, default=3.0)
    parser.add_argument("--dense-step", default="", help="ms of a dense step at each length, with commas")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    steps = [float(x) for x in options.dense_step.split(",") if x]
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for index, tokens in enumerate(int(x) for x in options.tokens.split(",")):
        torch._dynamo.reset()
        dense, *_ = attend_call("dense", 1, tokens, None)
        dense_ms = graph_ms(dense)
        for policy in map(parse_policy, options.policy or ["default"]):
            for tier2, slots, rho in variants(options):
                row = measure(tokens, policy, tier2, options.sharp, dense_ms, slots, rho)
                if steps:
                    row["step_ratio"] = 1 + LAYERS * (row["ms"] - dense_ms) / steps[index]
                rows.append(row)
                parts = ", ".join(f"{name} {value:.3f}" for name, value in sorted(row["phases_ms"].items()))
                print(f"{tokens:7,} {tier2:7}{row['policy']:20} {row['ms']:.3f} ms, dense {dense_ms:.3f} ({row['ratio']:.2f}x); {parts}")
                print(f"        keys {row['keys_share']:.2%}, values {row['values_share']:.2%}, rungs {row['rungs']}"
                      + (f", step {row['step_ratio']:.2f}x" if steps else ""))
                print(f"        {row['queries']}, {row['fallen']:.1%} of head-steps fell; " + (
                    f"scratch of {slots} in {SET} blocks: {row['scratch_hits']:.1%} of blocks of keys found there,"
                    f" {row['host_key_bytes_a_step'] / 1e6:.2f} MB of keys a step over the bus" if slots else "no scratch"))
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
