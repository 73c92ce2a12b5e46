"""One new token of certified attention by its kernels: whole, by phases, and against the scheme ``dense``; correctness first.

    python benchmarks/extensions/certified/certified.py [--json FILE] [--tokens 8192,65536,131072] [--policy SPELLING]
            [--tier2 device,host] [--sharp X]
                                   [--scratch 0,1024] [--value-scratch 256] [--drift 1,0.99,0.9] [--values int4,full]

H=32 query heads, K=8 kv heads, D=128, bfloat16, one row. Times are medians over CUDA-graph replays of what Inductor makes of one layer's
attention. Phases are the device times of its kernels as torch's profiler sees them: those of ``kernels.certified`` by name, and
"algebra", everything that Inductor made. ``host``: the originals lie in pinned host memory, which the kernels read where they are.

``--scratch``: blocks of host keys that are kept on the device for each kv head, ``--value-scratch`` those of values where there are some of
keys (``certified(tier2=host, scratch=1024, value_scratch=256)``). What that saves
depends on the queries, so each row says which: ``--drift 1`` is the same query at every step, where everything is found from the second on;
R below 1 is q = R q + sqrt(1 - R^2) noise before every step, noise that is new in every replay. The time of making it alone is taken
from that of both; phases are without it. Hit rates and bytes over the bus are the telemetry's, over the timed steps and those before them.

``--dense-step`` takes the ms of a whole dense step at each length (from benchmarks/step.py); the ratio of steps of 32 layers is then
reported, which may be 1.3. Random keys spread attention over everything; ``--sharp`` multiplies the queries.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from benchmarks.attention import attend_call, graph_ms
from benchmarks.extensions.certified.certified_soundness import Cache, Step, by_kernels, distance, returned
from kvcompile.extensions.certified.scheme import BLOCK, ValueStorage
from kvcompile.extensions.certified.site_op import certified_site
from kvcompile.lowering.certificate.summary import Telemetry
from kvcompile.lowering.compile import compile_graph
from kvcompile.passes.graph.dynamo import ConstantSource
from kvcompile.runtime.store.pinned import host_plane
from kvcompile.schemes.certificate.policy import Certify, Count, parse_policy
from kvcompile.schemes.certificate.telemetry import TELEMETRY
from kvcompile.settings import Settings
from kvcompile.types import PAGE

H, K, D, LAYERS = 32, 8, 128, 32
PHASES = {
    **{name: name for name in (
        "key_scores", "select_blocks", "stage_blocks", "exact_scores", "bound_sums", "weighted_values", "weighted_originals", "certify",
        "dense_scores", "dense_values", "finalize",
    )},
    "unite_blocks": "select_blocks", "spend_value_budget": "bound_sums",
}
"""The phase of a step that each kernel belongs to."""


def step_of(tokens: int, policy: Certify, tier2: str, sharp: float, values: ValueStorage) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """A step over random keys and values, the newest 17 of which are in the window as after one append."""
    draw = torch.Generator("cuda").manual_seed(tokens)
    length = tokens - 8
    q = (torch.randn(1, H, 1, D, generator=draw, device="cuda") * sharp).to(torch.bfloat16)
    k, v = (torch.randn(1, K, length, D, generator=draw, device="cuda").to(torch.bfloat16) for _ in range(2))
    cache = Cache.of(k, v, values, poison=False)
    cache.exact_newest = [x[:, :, -17:].contiguous() for x in (k, v)]
    cache.base = torch.tensor([length - 17], device="cuda")
    for half in range(2 if values is ValueStorage.INT4 else 1) if tier2 == "host" else ():
        plane = cache.originals[half]
        cache.originals[half] = host_plane(plane.shape, plane.dtype, plane.device).copy_(plane)
    return Step(q, cache, D**-0.5, policy, values=values), k, v


def operands(step: Step, tier2: str = "device", scratch: tuple[int, int] = (0, 0)) -> list[Any]:
    """Return the operands of ``kvcompile::certified_site``; an empty ``scratch`` of so many blocks of keys and of values."""
    cache, full = step.cache, step.values is ValueStorage.FULL
    where = f"tier2={tier2}, scratch={scratch[0]}, value_scratch={scratch[1]}, values={step.values.value}"
    spelled = f"certified(certify={step.policy.spec()}, {where})"
    pages = cache.keys[0].shape[0]
    held: list[torch.Tensor | None] = []
    for slots in scratch:
        places = torch.zeros(pages, 1, K, PAGE // BLOCK, 2, dtype=torch.int32, device="cuda")
        held += [places, torch.zeros(1, 1, K, slots * BLOCK, D, dtype=step.q.dtype, device="cuda")] if slots else [None, None]
    return [
        step.q, [*cache.keys, cache.originals[0]], cache.values if full else [*cache.values, cache.originals[1]], step.hi, None, None, None,
        None, spelled, spelled, step.scale, 0.0, D, cache.exact_newest, cache.base,
        torch.zeros(1, 1, K, 1, TELEMETRY, dtype=torch.float64, device="cuda"), *held,
    ]


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
    """One layer's certified attention in a graph that is compiled as a rewritten model is: for any number of pages."""
    graph, fake_mode = torch.fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    names = {id(x): graph.placeholder(f"operand{index}") for index, x in enumerate(tensors)}
    pages, fakes = given[1][0].shape[0], []
    for index, x in enumerate(tensors):
        grows = x.dim() == 5 and x.shape[0] == pages > 1
        sizes = [DimDynamic.DUCK if grows and not axis else DimDynamic.STATIC for axis in range(x.dim())]
        context = StatelessSymbolicContext(sizes)
        fakes.append(fake_mode.from_tensor(x, source=ConstantSource(f"operand{index}"), symbolic_context=context))
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table: the place of tier 2, the form of values, blocks of both scratches, what a query keeps of the one before."""

    tier2: str
    values: ValueStorage
    scratch: tuple[int, int]
    rho: float


def measure(tokens: int, policy: Certify, variant: Variant, sharp: float, dense_ms: float) -> dict[str, Any]:
    """One row; ends the benchmark where a result is not within its certificate."""
    tier2, scratch, rho = variant.tier2, variant.scratch, variant.rho
    step, k, v = step_of(tokens, policy, tier2, sharp, variant.values)
    given = operands(step, tier2, scratch)
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
        "tokens": tokens, "tier2": tier2, "policy": policy.spec(), "sharp": sharp, "ms": ms, "dense_ms": dense_ms, "ratio": ms / dense_ms,
        "phases_ms": by_phase, "keys_share": read / blocks, "values_share": originals / blocks,
        "rungs": torch.bincount(counts[..., Count.RUNG].flatten().long(), minlength=5).tolist(),
        "certificate_mean": bound.mean().item(), "error_mean": error.mean().item(),
        "tier1_bytes": sum(plane.nbytes for plane in (*step.cache.keys, *step.cache.values)),
        "tier2_bytes_read_at_most": (read + originals) * 16 * D * 2, "scratch": scratch, "drift": rho, "queries": drift.title(),
        "values": variant.values.value, "fallen": (told["rung_head"] + told["rung_layer"]) / told["head_steps"],
        "widened": told["widened"] / told["head_steps"], "promoted": [told.quantile("keys", share) for share in (0.5, 0.95)],
        "promoted_mean": told["keys"] / told["head_steps"],
    }
    if tier2 == "host":
        steps = told["steps"] / K
        for half in ("key", "value"):
            row[f"{half}_union"] = (told[f"{half}_found"] + told[f"{half}_fetched"]) / told["steps"] / (blocks / H)
            row[f"{half}_hits"] = told[f"{half}_found"] / max(1.0, told[f"{half}_found"] + told[f"{half}_fetched"])
            row[f"{half}_bytes_a_step"] = told[f"{half}_bytes"] / steps
        row["scratch_bytes"] = sum(plane.nbytes for plane in given[16:] if plane is not None)
    return row


def variants(options: argparse.Namespace) -> Iterator[Variant]:
    """Variants of the command's options; queries drift only where there is a scratch."""
    for tier2 in options.tier2.split(","):
        for values in map(ValueStorage, options.values.split(",")):
            for slots in map(int, options.scratch.split(",")) if tier2 == "host" else (0,):
                more = options.value_scratch if slots and values is ValueStorage.INT4 else 0
                for rho in map(float, options.drift.split(",")) if slots else (1.0,):
                    yield Variant(tier2, values, (slots, more), rho)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="8192,65536,131072")
    parser.add_argument("--policy", action="append", help="as Certify.spec writes it; may be given more than once")
    parser.add_argument("--tier2", default="device,host")
    parser.add_argument("--scratch", default="0,1024", help="blocks of keys for each kv head, where tier 2 is on the host")
    parser.add_argument("--value-scratch", type=int, default=256, help="blocks of values, where there is a scratch of keys")
    parser.add_argument("--values", default="int4", help="int4, full")
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
            for variant in variants(options):
                row = measure(tokens, policy, variant, options.sharp, dense_ms)
                if steps:
                    row["step_ratio"] = 1 + LAYERS * (row["ms"] - dense_ms) / steps[index]
                rows.append(row)
                parts = ", ".join(f"{name} {value:.3f}" for name, value in sorted(row["phases_ms"].items()))
                kind = f"{tokens:7,} {variant.tier2:7}{row['values']:5}{row['policy']:20}"
                print(f"{kind} {row['ms']:.3f} ms, dense {dense_ms:.3f} ({row['ratio']:.2f}x); {parts}")
                print(f"        keys {row['keys_share']:.2%}, values {row['values_share']:.2%}, rungs {row['rungs']}"
                      + (f", step {row['step_ratio']:.2f}x" if steps else ""))
                print(f"        {row['queries']}, {row['fallen']:.1%} of head-steps fell, {row['widened']:.1%} widened, keys promoted"
                      f" {row['promoted'][0]:.0f} at the median, 95%: {row['promoted'][1]:.0f}")
                if variant.tier2 == "host":
                    print(f"        scratch {variant.scratch}: found {row['key_hits']:.1%} of keys, {row['value_hits']:.1%} of values; over"
                          f" the bus a step {row['key_bytes_a_step'] / 1e6:.2f}, {row['value_bytes_a_step'] / 1e6:.2f} MB")
                torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
