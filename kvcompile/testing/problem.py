"""Problem: a small attention over encoded tokens, and its reference in float64 over the decoded tokens.

The reference sees the decoded keys and values, so that quantization error cannot hide an error of the operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import append_body, attend, attend_body, decodable
from kvcompile.schemes import Scheme
from kvcompile.testing.laws import unlike
from kvcompile.testing.samples import normal, unwritten
from kvcompile.types import Role, SlotSpec, pages_for

SPARE = 2
"""Pages beyond the tokens in use; full of NaN and garbage codes, as all that was never written."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, scale: float, softcap: float = 0.0,
) -> torch.Tensor:
    """Return the attention softmax(q k^T scale + bias) v, float64 [B, H, S, Dv], computed over materialized scores.

    A query that sees no token gets zeros. ``q``: [B, H, S, D]; ``k``, ``v``: [B, K, T, D or Dv] with H a multiple of K. ``mask``: bool,
    broadcast to [B, H, S, T], True where a query sees a token. ``bias``: added to scores; ``sinks``: one logit per head [H], in the softmax
    like a token with a value of zero. ``softcap``: scores become softcap * tanh(scores / softcap) before the bias; 0 for none.
    """
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
    """Two stores filled with ``tokens`` tokens, with garbage in all other slots, the decoded tokens, and queries after them."""

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

    def __post_init__(self) -> None:
        self.keys, self.values = self.keys.for_role(Role.KEY), self.values.for_role(Role.VALUE)
        self.window = max(self.keys.window, self.values.window)
        self.exact_newest: list[torch.Tensor] = []
        # The newest tokens come in one last call, as the queries' own do.
        self.base = torch.tensor([max(self.tokens - self.queries, 0) - self.window], device="cpu") if self.window else None
        self.q = normal(self.batch, self.kv_heads * self.groups, self.queries, self.width, dtype=self.dtype, seed=1) / 4
        self.k_planes, self.k = self._store(self.keys, Role.KEY, self.width, 2)
        self.v_planes, self.v = self._store(self.values, Role.VALUE, self.width_v, 3)
        self.scale = 1 / math.sqrt(self.width)
        self.hi = torch.arange(self.tokens - self.queries, self.tokens, device="cpu").unsqueeze(0)

    def _store(self, scheme: Scheme, role: Role, width: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        spec = SlotSpec(self.kv_heads, width, self.dtype, role)
        layout = scheme.layout(spec)
        if self.window:
            layout = layout.windowed(spec, self.window)
        planes = [unwritten(scheme, spec, plane, pages_for(self.tokens) + SPARE, self.batch) for plane in layout.planes]
        x = normal(self.batch, self.kv_heads, self.tokens, width, dtype=self.dtype, seed=seed)
        pos = torch.arange(self.tokens, device="cpu").unsqueeze(0)
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
        """Return the operands of ``attend``, in order; ``hi`` None: the problem's own limits."""
        return (
            self.q, self.read(Role.KEY), self.read(Role.VALUE), self.hi if hi is None else hi, operands.get("lo"), operands.get("keep"),
            operands.get("bias"), operands.get("sinks"), self.keys.spec(), self.values.spec(), self.scale,
            operands.get("softcap", 0.0), self.width_v, self.exact_newest or None, self.base,
        )

    def read(self, role: Role) -> list[torch.Tensor]:
        """Return the planes of the key or value store that attention reads, by the scheme's kernel format."""
        planes, scheme, width = (
            (self.k_planes, self.keys, self.width) if role is Role.KEY else (self.v_planes, self.values, self.width_v)
        )
        return planes[: scheme.format(SlotSpec(self.kv_heads, width, self.dtype, role)).planes]

    def mask(self, hi: torch.Tensor | None = None, **operands: Any) -> torch.Tensor:
        """Return bool [B or 1, H or 1, S, T], True where a query sees a token, by the limits and masks that ``arguments`` takes too.

        ``operands``: ``lo``, ``keep`` and ``bias``, of which only a boolean bias hides tokens. ``hi``: None for the problem's own.
        """
        t = torch.arange(self.tokens, device="cpu")
        mask = t <= (self.hi if hi is None else hi)[:, None, :, None]
        if operands.get("lo") is not None:
            mask = mask & (t >= operands["lo"][:, None, :, None])
        if operands.get("keep") is not None:
            keep = torch.zeros(operands["keep"].shape[0], self.tokens, dtype=torch.bool, device="cpu")
            keep[:, : operands["keep"].shape[1]] = operands["keep"][:, : self.tokens]
            mask = mask & keep[:, None, None, :]
        bias = operands.get("bias")
        if bias is not None and bias.dtype == torch.bool:
            mask = mask & bias
        return mask

    def wanted(self, **operands: Any) -> torch.Tensor:
        """Return the result of ``reference``, float64 [B, H, S, Dv], for the operands that ``arguments`` takes."""
        bias = operands.get("bias")
        return reference(
            self.q, self.k, self.v, self.mask(**operands), bias=None if bias is None or bias.dtype == torch.bool else bias,
            sinks=operands.get("sinks"), scale=self.scale, softcap=operands.get("softcap", 0.0),
        )

    def check(self, **operands: Any) -> torch.Tensor:
        """Check ``attend``, and its body in float64, against the reference within rounding; return the result of ``attend``.

        Raises Unlike.
        """
        found, wanted = attend(*self.arguments(**operands)), self.wanted(**operands)
        if found.dtype != self.dtype or found.shape != wanted.shape:
            unlike(f"a result {tuple(wanted.shape)} in {self.dtype}", f"{tuple(found.shape)} in {found.dtype}")
        size = self.v.double().abs().max()
        exact = attend_body(AttendOperands(*self.arguments(**operands)), compute=torch.float64)
        rounding = torch.finfo(self.dtype).eps * size
        float32 = 64 * torch.finfo(torch.float32).eps * size
        for result, allowed in ((exact, rounding), (found, rounding + float32)):
            error = (result.double() - wanted).abs().max()
            if not error <= allowed:
                unlike(f"attention over the decoded tokens, within {float(allowed):.3g}", f"an error of {float(error):.3g} ({self.dtype})")
        return found


def masks(problem: Problem) -> dict[str, dict[str, Any]]:
    """Return operands that hide or weigh tokens, by name: each mask and bias alone, and some of them together."""
    generator = torch.Generator().manual_seed(5)
    B, H, S, T = problem.batch, problem.kv_heads * problem.groups, problem.queries, problem.tokens
    keep = torch.rand(B, T, generator=generator, device="cpu") > 0.3
    keep[:, -1] = True
    bias = torch.randn(1, H, S, T, generator=generator, device="cpu")
    allowed = torch.rand(B, 1, S, T, generator=generator, device="cpu") > 0.2
    lo = (problem.hi - 5).clamp(min=0)
    sinks = torch.randn(H, generator=generator, device="cpu")
    rows = torch.stack([problem.hi[0], problem.hi[0] - 40])
    return {
        "causal": {}, "by row": {"hi": rows}, "window": {"lo": lo}, "padding": {"keep": keep},
        "short padding": {"keep": keep[:, :30]}, "bias": {"bias": bias}, "bool": {"bias": allowed}, "softcap": {"softcap": 2.0},
        "sinks": {"sinks": sinks}, "large sinks": {"sinks": sinks + 60}, "no sinks": {"sinks": sinks - float("inf")},
        "one row of bias": {"bias": bias[:, :, :1]}, "one head of bias": {"bias": bias[:, :1]},
        "all": {"hi": rows, "lo": lo, "keep": keep, "bias": bias, "softcap": 3.0, "sinks": sinks},
    }
