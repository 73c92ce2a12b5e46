"""Soundness of certified attention, counted: head-steps whose distance to float64 is above their certificate.

    python benchmarks/extensions/certified/certified_soundness.py [--trials N] [--device cpu|cuda] [--kernels] [--seed N] [--json FILE]

Every case (gaussian, ties, outlier channels, keys and values whose rounding errors all point one way, ...) runs with every policy
and dtype in turn until N head-steps are done. The reference is attention over the originals in float64; a head-step counts as a
violation where |output - reference|_2 is above the certificate that was returned with it, and also where a dense one is not what the
scheme ``dense`` gives, bit for bit. Exits with 1 on any violation. ``tests/extensions/certified/test_certified_soundness.py`` runs the same
trials.

``--kernels`` tries the CUDA kernels in place of the definition, on shapes and cases that they know; a dense head-step is then held to its
certificate alone. TRITON_INTERPRET=1 runs them on a CPU, slowly.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcompile.extensions.certified.definition import certified_step
from kvcompile.extensions.certified.device_step import certified_by_kernels
from kvcompile.extensions.certified.scheme import BLOCK, Certified, ValueStorage
from kvcompile.extensions.certified.sizes import kernel_gap
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.schemes.certificate.policy import EXACT, NAIVE, Certify, Count, Fallback, Figure, Rung, Select, parse_policy
from kvcompile.types import PAGE, Role


def paged(rows_BKRW: torch.Tensor, pages: int) -> torch.Tensor:
    """Rows of every token or block as the pages of a plane, [N, B, K, rows, width]."""
    return rows_BKRW.unflatten(2, (pages, -1)).permute(2, 0, 1, 3, 4).contiguous()


@dataclasses.dataclass
class Cache:
    """The planes of one layer, and the newest tokens; ``length`` tokens, the whole blocks of which are codes."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    originals: list[torch.Tensor]
    exact_newest: list[torch.Tensor]
    base: torch.Tensor
    length: int

    @staticmethod
    def of(k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, values: ValueStorage = ValueStorage.INT4, poison: bool = True) -> Cache:
        """Encode all whole blocks; what is not written is NaN, or the bytes 0x5A."""
        length = k_BKTD.shape[2]
        pages, whole = -(-length // PAGE), length // BLOCK * BLOCK
        planes: list[list[torch.Tensor]] = []
        for x, role in ((k_BKTD, Role.KEY), (v_BKTD, Role.VALUE)):
            scheme = Certified(values=values).for_role(role)
            filled = torch.nn.functional.pad(x[:, :, :whole], (0, 0, 0, pages * PAGE - whole))
            encoded = []
            for plane in scheme.encode(filled)[:4]:
                written = plane.shape[2] * whole // (pages * PAGE)
                if poison:
                    plane[:, :, written:] = float("nan") if plane.is_floating_point() else 0x5A
                encoded.append(paged(plane, pages))
            planes.append(encoded)
        originals = []
        for x in (k_BKTD, v_BKTD):
            tail = torch.full_like(x[:, :, :1], float("nan")).expand(-1, -1, pages * PAGE - length, -1)
            originals.append(paged(torch.cat([x, tail], dim=2), pages))
        exact_newest = []
        for x in (k_BKTD, v_BKTD):
            room = torch.zeros_like(x[:, :, :1]).expand(-1, -1, BLOCK - (length - whole), -1)
            exact_newest.append(torch.cat([x[:, :, whole:], room], dim=2))
        if values is ValueStorage.FULL:
            # They are read where they are.
            planes[1] = [originals[1], planes[1][1]]
        return Cache(planes[0], planes[1], originals, exact_newest, torch.tensor([whole], device=k_BKTD.device), length)


@dataclasses.dataclass
class Step:
    """One attention over a cache."""

    q: torch.Tensor
    cache: Cache
    scale: float
    policy: Certify = dataclasses.field(default_factory=Certify)
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    lo: torch.Tensor | None = None
    softcap: float = 0.0
    clock: int = 1
    values: ValueStorage = ValueStorage.INT4

    @property
    def hi(self) -> torch.Tensor:
        """The last positions that each query sees: the newest tokens are the queries'."""
        S = self.q.shape[2]
        return torch.arange(self.cache.length - S, self.cache.length, device=self.q.device)[None]

    def run(self, compiled: object = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, figures, counters."""
        body, cache = compiled or certified_step, self.cache
        clock = torch.tensor([self.clock], device=self.q.device)
        return body(  # type: ignore[operator]
            parse_policy(self.policy.spec()), Certified(values=self.values), self.operands(), cache.originals, clock
        )

    def operands(self) -> AttendOperands[torch.Tensor]:
        """The operands of ``attend`` over the codes."""
        cache = self.cache
        return AttendOperands(
            self.q, cache.keys, cache.values, self.hi, self.lo, self.keep, self.bias, self.sinks, "certified", "certified", self.scale,
            self.softcap, cache.originals[1].shape[-1], cache.exact_newest, cache.base,
        )

    def exact(self, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> torch.Tensor:
        """The same attention over the originals in float64, [B, H, S, Dv]."""
        G, T = self.q.shape[1] // k_BKTD.shape[1], k_BKTD.shape[2]
        k, v = (x.to(torch.float64).repeat_interleave(G, 1) for x in (k_BKTD, v_BKTD))
        scores = self.q.to(torch.float64) @ k.transpose(-1, -2) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias[..., :T].to(torch.float64)
        t = torch.arange(T, device=k.device)
        seen = t <= self.hi[:, None, :, None]
        if self.lo is not None:
            seen = seen & (t >= self.lo[:, None, :, None])
        if self.keep is not None:
            seen = seen & self.keep[:, None, None, :T]
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.to(torch.float64)[None, :, None, None].expand(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        return torch.where(seen.any(-1, keepdim=True), weights, 0) @ v

    def dense(self) -> torch.Tensor:
        """The scheme ``dense`` over the originals."""
        planes = [plane.to(self.q.device) for plane in self.cache.originals]
        return attend_body(dataclasses.replace(
            self.operands(), keys=planes[:1], values=planes[1:], key_scheme="dense", value_scheme="dense", exact_newest=None, base=None
        ))


def returned(figures: torch.Tensor) -> torch.Tensor:
    """The certificate of what was returned, float64 [B, H, S]."""
    return figures[..., [Figure.KEY, Figure.VALUE, Figure.ARITHMETIC]].to(torch.float64).sum(-1)


def distance(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|output - exact|_2 of each head-step, in float64."""
    return torch.linalg.vector_norm(output.to(torch.float64) - exact, dim=-1)


def flipped(plane: torch.Tensor, at: Sequence[int], bit: int) -> torch.Tensor:
    """The plane with one bit of one element flipped."""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plane.element_size()]
    out = plane.clone()
    word = out.view(raw)
    mask = torch.tensor(1 << bit if bit < 8 * plane.element_size() - 1 or raw == torch.uint8 else -(1 << bit), dtype=raw)
    word[tuple(at)] ^= mask
    return out


@dataclasses.dataclass(frozen=True)
class Shape:
    """B rows, H query heads over K kv heads, S queries a head, D channels, T tokens."""

    B: int = 2
    H: int = 8
    K: int = 2
    S: int = 32
    D: int = 32
    T: int = 120


@dataclasses.dataclass
class Inputs:
    """Queries, keys, values, and what else a step has."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    more: dict[str, object] = dataclasses.field(default_factory=dict)

    def step(self, policy: Certify, dtype: torch.dtype, **changes: object) -> tuple[Step, torch.Tensor, torch.Tensor]:
        """In a dtype: the step, and the keys and values as they were rounded to it."""
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        made = dict(scale=q.shape[-1] ** -0.5, policy=policy) | self.more | changes
        return Step(q, Cache.of(k, v, ValueStorage(made.get("values", ValueStorage.INT4))), **made), k, v  # type: ignore[arg-type]


class Draw:
    """Random numbers of one seed on one device."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.source, self.device = torch.Generator(device).manual_seed(seed), device

    def normal(self, *shape: int) -> torch.Tensor:
        """Gaussian, float32."""
        return torch.randn(shape, generator=self.source, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """In [0, 1)."""
        return torch.rand(shape, generator=self.source, device=self.device)

    def signs(self, *shape: int) -> torch.Tensor:
        """-1 or 1."""
        return 1.0 - 2.0 * (self.uniform(*shape) < 0.5)

    def inputs(self, s: Shape) -> Inputs:
        """Gaussian queries, keys and values."""
        return Inputs(self.normal(s.B, s.H, s.S, s.D), self.normal(s.B, s.K, s.T, s.D), self.normal(s.B, s.K, s.T, s.D))


def gaussian(draw: Draw, s: Shape) -> Inputs:
    """Queries from flat to sharp attention."""
    made = draw.inputs(s)
    made.q *= 10 ** (3 * draw.uniform(s.B, s.H, s.S, 1) - 1.5)
    return made


def outliers(draw: Draw, s: Shape) -> Inputs:
    """Loud channels far from zero, as keys have."""
    made = draw.inputs(s)
    made.k[..., ::7] = made.k[..., ::7] * 15 + 40
    made.v[..., ::5] *= 20
    return made


def ties(draw: Draw, s: Shape) -> Inputs:
    """Few different keys, and values between two levels."""
    made = draw.inputs(s)
    made.k = torch.round(made.k)
    made.k[:, :, 1::2] = made.k[:, :, ::2][:, :, : made.k[:, :, 1::2].shape[2]]
    made.v = torch.round(made.v * 2) / 2
    return made


def equal_blocks(draw: Draw, s: Shape) -> Inputs:
    """Every block holds the same keys but for a few units in the last place: all masses are nearly equal."""
    made = draw.inputs(s)
    made.k = made.k[:, :, :BLOCK].repeat(1, 1, s.T // BLOCK + 1, 1)[:, :, : s.T] * (1 + 2.0**-12 * draw.normal(s.B, s.K, s.T, 1))
    return made


def needle(draw: Draw, s: Shape) -> Inputs:
    """One token of each kv head that its queries look for, among many that are nearly as good."""
    made = draw.inputs(s)
    place = int(draw.uniform(1) * s.T)
    wanted = made.k[:, :, place].repeat_interleave(s.H // s.K, 1)[:, :, None]
    made.k = made.k * 0.2 + 0.8 * made.k[:, :, place : place + 1]
    made.q = wanted * (1 + 4 * draw.uniform(s.B, s.H, s.S, 1)) + 0.3 * made.q
    made.v[:, :, place] *= 5
    return made


def mixed_scales(draw: Draw, s: Shape) -> Inputs:
    """Blocks and channels of magnitudes from 1e-3 to 1e3."""
    made = draw.inputs(s)
    blocks = -(-s.T // BLOCK)
    sizes = (10 ** (6 * draw.uniform(s.B, s.K, blocks, s.D) - 3) for _ in range(2))
    key_size, value_size = (size.repeat_interleave(BLOCK, 2)[:, :, : s.T] for size in sizes)
    return Inputs(made.q, made.k * key_size, made.v * value_size)


def huge(draw: Draw, s: Shape) -> Inputs:
    """Norms as large as float16 holds, and logits in the thousands."""
    made = draw.inputs(s)
    made.k *= 2000
    made.v *= 5000
    return made


def denormal(draw: Draw, s: Shape) -> Inputs:
    """Numbers at and below the least normal ones of float16 and float32."""
    made = draw.inputs(s)
    made.k *= 10.0 ** -float(draw.uniform(1) * 40)
    made.v *= 10.0 ** -float(draw.uniform(1) * 40)
    return made


def constant(draw: Draw, s: Shape) -> Inputs:
    """Channels with no range, and channels with little range far from zero."""
    made = draw.inputs(s)
    made.k[..., ::2] = 3.1
    made.k[..., 1::4] = 1000 + 1e-3 * made.k[..., 1::4]
    made.v[..., ::2] = -2.7
    return made


def one_way_keys(draw: Draw, s: Shape) -> Inputs:
    """Every channel's key error points along the queries, half a step each, up for half the tokens; values point the same way."""
    made = draw.inputs(s)
    heading = draw.signs(s.B, s.K, 1, s.D)
    made.q = heading.repeat_interleave(s.H // s.K, 1) * (0.5 + draw.uniform(s.B, s.H, s.S, 1))
    token = draw.signs(s.B, s.K, s.T, 1)
    step = 10 ** (2 * draw.uniform(s.B, s.K, 1, 1) - 3)
    level = torch.floor(20 * draw.uniform(s.B, s.K, s.T, s.D))
    made.k = step * (level + 0.499 * token * heading)
    # Two tokens of each block span the range, so that the step is what it is meant to be.
    made.k[:, :, ::BLOCK] = 0
    made.k[:, :, 1::BLOCK] = 255 * step
    made.k = made.k - 255 * step / 2
    made.v = token * heading * 3 + 0.01 * made.v
    return made


def one_way_values(draw: Draw, s: Shape) -> Inputs:
    """Every value is nearly half a step above a level: all value errors point the same way."""
    made = draw.inputs(s)
    made.v = torch.floor(15 * draw.uniform(s.B, s.K, s.T, s.D)) + 0.499
    made.v[..., ::16], made.v[..., 1::16] = 0, 15
    made.q *= 0.1
    return made


def masked(draw: Draw, s: Shape) -> Inputs:
    """Padding, a sliding window, ALiBi, a softcap and a sink, each in some of the draws."""
    made = gaussian(draw, s)
    pick = draw.uniform(5) < 0.5
    if pick[0]:
        made.more["keep"] = draw.uniform(s.B, s.T) < 0.7
    if pick[1]:
        made.more["lo"] = torch.arange(s.T - s.S, s.T, device=draw.device)[None] - 50
    if pick[2]:
        slope = 2.0 ** -torch.arange(1, s.H + 1, device=draw.device)
        made.more["bias"] = slope[None, :, None, None] * torch.arange(-s.T, 0, device=draw.device)[None, None, None]
    if pick[3]:
        made.more["softcap"] = 5.0
    if pick[4]:
        made.more["sinks"] = draw.normal(s.H) * 3
    return made


CASES: tuple[Callable[[Draw, Shape], Inputs], ...] = (
    gaussian, outliers, ties, equal_blocks, needle, mixed_scales, huge, denormal, constant, one_way_keys, one_way_values, masked,
)

def padded(draw: Draw, s: Shape) -> Inputs:
    """Left padding, and a sink in some of the draws: what the kernels know of ``masked``."""
    made = gaussian(draw, s)
    first = (draw.uniform(s.B, 1) * (s.T - s.S)).to(torch.int64)
    made.more["lo"] = first.expand(-1, s.S)
    if bool(draw.uniform(1) < 0.5):
        made.more["sinks"] = draw.normal(s.H) * 3
    return made


KERNEL_CASES = (*(case for case in CASES if case is not masked), padded)
"""Those that the kernels know."""

POLICIES: dict[str, Certify] = {
    "default": Certify(),
    "naive": NAIVE,
    "few keys": Certify(k_min=1, k_max=2, widen=0, v_tol=math.inf, rank=0),
    "key budget": Certify(k_max=2, widen=2, key_budget=0.05, v_tol=math.inf),
    "value budget": Certify(tau_cov=0.5, k_min=0, k_max=4, v_tol=math.inf, value_budget=0.1, rank=0),
    "explore": Certify(tau_cov=0.9, k_min=0, k_max=3, explore=0.2, rank=2),
    "report": Certify(tau_cov=0.9, k_min=0, k_max=3, fallback=Fallback.REPORT),
    "group": Certify(tau_cov=0.8, k_min=1, k_max=2, select=Select.GROUP, explore=0.1),
    "agree": Certify(agree=True, certain=False, k_max=3),
    "exact": EXACT,
}

SETTINGS: dict[str, tuple[Certify, ValueStorage]] = {
    **{name: (policy, ValueStorage.INT4) for name, policy in POLICIES.items()},
    **{f"{name}, full values": (POLICIES[name], ValueStorage.FULL) for name in ("default", "few keys", "explore")},
}
"""Policies of trials by name, each with the form of the stored values: all with int4, some in full precision."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Tally:
    """What trials of one kind came to."""

    head_steps: int = 0
    violations: int = 0
    dense: int = 0
    not_finite: int = 0
    closest: float = 0.0
    """The largest distance relative to its certificate, among results that are not dense."""

    def add(self, other: Tally) -> None:
        """Count another one's trials too."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name == "closest" else mine + theirs)


def by_kernels(
    rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: list[torch.Tensor], clock: torch.Tensor,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``certified_step`` by kernels alone: raises where they do not know the attention."""
    gap = kernel_gap(operands, scheme)
    if gap is not None:
        raise ValueError(f"expected an attention that the kernels know, found {gap}")
    return certified_by_kernels(rules, scheme, operands, originals, clock, splits=splits)


def judge(step: Step, k: torch.Tensor, v: torch.Tensor, run: object = None) -> Tally:
    """One step against float64, and its dense results against the scheme ``dense``; with ``run`` for the definition, float64 alone."""
    output, figures, counts = step.run(run)
    error, bound = distance(output, step.exact(k, v)), returned(figures)
    dense = counts[..., Count.RUNG] >= Rung.HEAD
    # A result that is no number claims nothing; what must not be is a number beyond its bound, or a bound that is no number on one.
    finite = torch.isfinite(output).all(-1)
    fine = torch.where(finite, error <= bound, dense | (step.policy.fallback is Fallback.REPORT))
    if run is None:
        same = (output == step.dense()) | (torch.isnan(output) & torch.isnan(step.dense()))
        fine = fine & (~dense | same.all(-1))
    ratio = torch.where(finite & ~dense, error / bound, 0)
    return Tally(error.numel(), int((~fine).sum()), int(dense.sum()), int((~finite).sum()), float(ratio.max()))


def trials(
    shape: Shape, seed: int, device: str = "cpu", run: object = None, cases: Sequence[Callable[[Draw, Shape], Inputs]] = CASES,
    dtypes: Sequence[torch.dtype] = DTYPES, chosen: Sequence[str] = tuple(SETTINGS),
) -> Iterator[tuple[str, str, torch.dtype, Tally]]:
    """Every case with every policy and dtype, again and again with other numbers."""
    for number in itertools.count(seed):
        for case in cases:
            for dtype in dtypes:
                inputs = case(Draw(number, device), shape)
                for name in chosen:
                    policy, values = SETTINGS[name]
                    if run is not None and values is ValueStorage.FULL and dtype == torch.float32:
                        # What the kernels do not know.
                        continue
                    step, k, v = inputs.step(policy, dtype, clock=number, values=values)
                    yield case.__name__, name, dtype, judge(step, k, v, run)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1_000_000, help="head-steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", action="store_true", help="the kernels in place of the definition")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="", help="SHAPE:DTYPE, one of either: processes side by side")
    parser.add_argument("--policies", default=";".join(SETTINGS), help="names with semicolons between them (default: all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = (Shape(), Shape(K=8, S=8, D=64, T=333), Shape(B=1, H=4, K=1, S=16, D=128, T=1000), Shape(B=3, H=6, K=2, S=1, D=80, T=47))
    began, found, whole = time.perf_counter(), {}, Tally()
    if arguments.kernels:
        shapes = (
            Shape(B=64, S=4, T=120), Shape(B=16, H=32, K=8, S=1, D=64, T=333), Shape(B=4, H=32, K=8, S=4, D=128, T=1000),
            Shape(B=8, H=14, K=2, S=2, D=64, T=50), Shape(B=2, H=32, K=8, S=1, D=128, T=5000),
        )
    own: dict[str, Any] = dict(run=by_kernels, cases=KERNEL_CASES) if arguments.kernels else {}
    own["chosen"] = arguments.policies.split(";")
    if arguments.part:
        index, _, dtype = arguments.part.partition(":")
        shapes, own["dtypes"] = (shapes[int(index)],), (getattr(torch, dtype),)
    streams = [trials(shape, arguments.seed, arguments.device, **own) for shape in shapes]
    while whole.head_steps < arguments.trials:
        for stream in streams:
            case, _, dtype, tally = next(stream)
            found.setdefault((case, str(dtype).removeprefix("torch.")), Tally()).add(tally)
            whole.add(tally)
    print(f"{'case':16}{'dtype':10}{'head-steps':>12}{'violations':>12}{'dense':>10}{'not finite':>12}{'closest':>10}")
    for (case, dtype), tally in found.items():
        numbers = f"{tally.head_steps:12,}{tally.violations:12,}{tally.dense:10,}{tally.not_finite:12,}{tally.closest:10.3f}"
        print(f"{case:16}{dtype:10}{numbers}")
    where = f"on {arguments.device}" + ", by kernels" * arguments.kernels
    print(f"{whole.violations} violations in {whole.head_steps:,} head-steps, {time.perf_counter() - began:.0f} s {where}")
    if arguments.json:
        arguments.json.write_text(json.dumps({
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", "torch": torch.__version__,
            "kernels": arguments.kernels, "total": dataclasses.asdict(whole), "seed": arguments.seed,
            "cases": [{"case": case, "dtype": dtype, **dataclasses.asdict(tally)} for (case, dtype), tally in found.items()],
        }, indent=1))
    return int(whole.violations > 0)


if __name__ == "__main__":
    sys.exit(main())
