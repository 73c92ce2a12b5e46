"""The eager ``attend``, which every kernel is held against, against attention written down in float64.

The reference sees the decoded keys and values, so that quantization error never hides the operation's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from registry import VARIANTS, each_dtype, each_scheme, fitting, holds, normal, slot, unwritten

from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import append_body, attend, attend_body, decodable
from kvcompile.schemes import Scheme
from kvcompile.types import PAGE, Role, SlotSpec, pages_for

pytestmark = pytest.mark.usefixtures("one_thread")

SPARE = 2
"""Pages beyond the tokens in use; full of NaN and garbage codes, as all that was never written."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, scale: float, softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(q k' scale) v in float64 over materialized scores; a sink is one more column that has no value."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
    return weights @ v


@dataclass
class Problem:
    """Stores filled with ``tokens`` tokens among garbage, queries behind them, and what decoding gives back."""

    keys: Scheme
    values: Scheme
    dtype: torch.dtype = torch.float32
    batch: int = 2
    kv_heads: int = 2
    groups: int = 3
    queries: int = 4
    tokens: int = 70
    width: int = 64
    width_v: int = 64
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, self.values = self.keys.for_role(Role.KEY), self.values.for_role(Role.VALUE)
        self.window = max(self.keys.window, self.values.window)
        self.exact_newest: list[torch.Tensor] = []
        # The newest tokens come in one last call, as the queries' own do.
        self.base = torch.tensor([max(self.tokens - self.queries, 0) - self.window]) if self.window else None
        self.q = normal(self.batch, self.kv_heads * self.groups, self.queries, self.width, dtype=self.dtype, seed=1) / 4
        self.k_planes, self.k = self._store(self.keys, Role.KEY, self.width, 2)
        self.v_planes, self.v = self._store(self.values, Role.VALUE, self.width_v, 3)
        self.scale = 1 / math.sqrt(self.width)
        self.hi = torch.arange(self.tokens - self.queries, self.tokens).unsqueeze(0)

    def _store(self, scheme: Scheme, role: Role, width: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        spec = SlotSpec(self.kv_heads, width, self.dtype, role)
        layout = scheme.layout(spec)
        if self.window:
            layout = layout.windowed(spec, self.window)
        planes = [unwritten(scheme, spec, plane, pages_for(self.tokens) + SPARE, self.batch) for plane in layout.planes]
        x = normal(self.batch, self.kv_heads, self.tokens, width, dtype=self.dtype, seed=seed)
        pos = torch.arange(self.tokens).unsqueeze(0)
        if not self.window:
            append_body(x, planes, pos, scheme.spec())
            return planes, scheme.decode(decodable(scheme, planes, spec, slice(None)), spec)[:, :, : self.tokens]
        before = max(self.tokens - self.queries, 0)
        if before:
            append_window_body(x[:, :, :before], planes, pos[:, :before], None, scheme.spec())
        self.exact_newest.append(append_window_body(x[:, :, before:], planes, pos[:, before:], None, scheme.spec())[0])
        decoded = scheme.decode(decodable(scheme, planes, spec, slice(None)), spec)[:, :, : self.tokens]
        exact = pos[0] >= before - self.window
        return planes, torch.where(exact[:, None], x.to(torch.float32), decoded)

    def arguments(self, hi: torch.Tensor | None = None, **operands: Any) -> tuple[Any, ...]:
        """The operation's operands, in order."""
        return (
            self.q, self.read(Role.KEY), self.read(Role.VALUE), self.hi if hi is None else hi, operands.get("lo"), operands.get("keep"),
            operands.get("bias"), operands.get("sinks"), self.keys.spec(), self.values.spec(), self.scale,
            operands.get("softcap", 0.0), self.width_v, self.exact_newest or None, self.base,
        )

    def read(self, role: Role) -> list[torch.Tensor]:
        """The planes that attention reads."""
        planes, scheme, width = (
            (self.k_planes, self.keys, self.width) if role is Role.KEY else (self.v_planes, self.values, self.width_v)
        )
        return planes[: scheme.format(SlotSpec(self.kv_heads, width, self.dtype, role)).planes]

    def mask(self, hi: torch.Tensor | None = None, **operands: Any) -> torch.Tensor:
        """The same limits as one bool tensor [B or 1, H or 1, S, T]."""
        t = torch.arange(self.tokens)
        mask = t <= (self.hi if hi is None else hi)[:, None, :, None]
        if operands.get("lo") is not None:
            mask = mask & (t >= operands["lo"][:, None, :, None])
        if operands.get("keep") is not None:
            keep = torch.zeros(operands["keep"].shape[0], self.tokens, dtype=torch.bool)
            keep[:, : operands["keep"].shape[1]] = operands["keep"][:, : self.tokens]
            mask = mask & keep[:, None, None, :]
        bias = operands.get("bias")
        if bias is not None and bias.dtype == torch.bool:
            mask = mask & bias
        return mask

    def check(self, **operands: Any) -> torch.Tensor:
        """Exact in float64, within rounding in the model's dtype; returns the result."""
        found = attend(*self.arguments(**operands))
        bias = operands.get("bias")
        wanted = reference(
            self.q, self.k, self.v, self.mask(**operands), bias=None if bias is None or bias.dtype == torch.bool else bias,
            sinks=operands.get("sinks"), scale=self.scale, softcap=operands.get("softcap", 0.0),
        )
        assert found.dtype == self.dtype and found.shape == wanted.shape
        size = self.v.double().abs().max()
        exact = attend_body(AttendOperands(*self.arguments(**operands)), compute=torch.float64)
        rounding = torch.finfo(self.dtype).eps * size
        assert (exact.double() - wanted).abs().max() <= rounding
        assert (found.double() - wanted).abs().max() <= rounding + 64 * torch.finfo(torch.float32).eps * size
        return found


def masks(problem: Problem) -> dict[str, dict[str, Any]]:
    """Every operand alone and some together."""
    generator = torch.Generator().manual_seed(5)
    B, H, S, T = problem.batch, problem.kv_heads * problem.groups, problem.queries, problem.tokens
    keep = torch.rand(B, T, generator=generator) > 0.3
    keep[:, -1] = True
    bias = torch.randn(1, H, S, T, generator=generator)
    allowed = torch.rand(B, 1, S, T, generator=generator) > 0.2
    lo = (problem.hi - 5).clamp(min=0)
    sinks = torch.randn(H, generator=generator)
    rows = torch.stack([problem.hi[0], problem.hi[0] - 40])
    return {
        "causal": {}, "by row": {"hi": rows}, "window": {"lo": lo}, "padding": {"keep": keep},
        "short padding": {"keep": keep[:, :30]}, "bias": {"bias": bias}, "bool": {"bias": allowed}, "softcap": {"softcap": 2.0},
        "sinks": {"sinks": sinks}, "large sinks": {"sinks": sinks + 60}, "no sinks": {"sinks": sinks - float("inf")},
        "one row of bias": {"bias": bias[:, :, :1]}, "one head of bias": {"bias": bias[:, :1]},
        "all": {"hi": rows, "lo": lo, "keep": keep, "bias": bias, "softcap": 3.0, "sinks": sinks},
    }


@pytest.mark.parametrize("name", masks(Problem(VARIANTS[0], VARIANTS[0])))
@each_scheme
def test_masks(cls: type[Scheme], name: str) -> None:
    problem = Problem(cls(), cls())
    problem.check(**masks(problem)[name])


@each_dtype
@each_scheme
def test_dtypes(cls: type[Scheme], dtype: torch.dtype) -> None:
    Problem(cls(), cls(), dtype).check()


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 1000])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (1, 4), (2, 7), (1, 8), (8, 1)])
def test_heads_and_lengths(kv_heads: int, groups: int, tokens: int) -> None:
    Problem(VARIANTS[-1], VARIANTS[0], kv_heads=kv_heads, groups=groups, tokens=tokens, queries=1, batch=3).check()


@pytest.mark.parametrize("values", VARIANTS, ids=lambda scheme: scheme.spec())
def test_keys_and_values_have_schemes_and_widths_of_their_own(values: Scheme) -> None:
    for keys in VARIANTS[:: len(VARIANTS) // 5]:
        if holds(keys, slot(head_dim=128)) and holds(values, fitting(values)):
            Problem(keys, values, width=128, width_v=fitting(values).head_dim, queries=2).check()


@each_dtype
@each_scheme
def test_a_query_that_may_see_nothing_gives_zeros(cls: type[Scheme], dtype: torch.dtype) -> None:
    problem = Problem(cls(), cls(), dtype)
    hi = problem.hi.clone()
    hi[0, 1] = -1
    assert not problem.check(hi=hi)[:, :, 1].any()
    keep = torch.ones(problem.batch, problem.tokens, dtype=torch.bool)
    keep[1] = False
    assert not problem.check(keep=keep)[1].any()
    assert not problem.check(keep=keep, sinks=torch.zeros(6))[1].any()
    nothing = torch.zeros(1, 1, problem.queries, problem.tokens, dtype=torch.bool)
    assert not problem.check(bias=nothing).any()
    assert not attend(*problem.arguments(bias=torch.where(nothing, 0.0, float("-inf")))).any()


@each_scheme
def test_what_is_not_read_does_not_matter(cls: type[Scheme]) -> None:
    problem = Problem(cls(), cls())
    lo, keep = torch.full_like(problem.hi, 10), torch.ones(1, problem.tokens, dtype=torch.bool)
    keep[:, 20:25] = False
    before = problem.check(lo=lo, keep=keep)
    for plane in (*problem.read(Role.KEY), *problem.read(Role.VALUE)):
        if plane.shape[3] == PAGE:  # A scale of several tokens is read for those that are seen.
            fill = float("nan") if plane.dtype.is_floating_point else 0x7F
            plane[0, :, :, :10] = fill
            plane[0, :, :, 20:25] = fill
    assert torch.equal(attend(*problem.arguments(lo=lo, keep=keep)), before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)], ids=["plain", "sinks"])
@pytest.mark.parametrize("role", Role)
@each_scheme
def test_nan_that_is_read_comes_out(cls: type[Scheme], role: Role, sinks: torch.Tensor | None, poison: float) -> None:
    problem = Problem(cls(), cls())
    planes, scheme = (problem.k_planes, problem.keys) if role is Role.KEY else (problem.v_planes, problem.values)
    x = torch.full((problem.batch, problem.kv_heads, 1, problem.width), poison)
    at = problem.tokens - 2
    # Query 0 stands before the token, the others see it. Inf times a negative query is minus infinity: no mass.
    problem.q.abs_()
    if problem.window:
        exact_newest = problem.exact_newest[0 if role is Role.KEY else 1]
        exact_newest[:, :, at - int(problem.base)] = poison  # type: ignore[arg-type]
    else:
        append_body(x, planes, torch.tensor([[at]]), scheme.spec())
    out = attend(*problem.arguments(sinks=sinks))
    assert not torch.isfinite(out[:, :, 2:]).any()
    if role is Role.KEY:
        assert torch.isfinite(out[:, :, :2]).all()
