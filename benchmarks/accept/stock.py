"""Stock: what torch.compile does with the same requests without this backend, to count compilations by and to blame failures on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from benchmarks.accept.outcomes import Outcome
from benchmarks.accept.references import ROUNDING, Verdict, wider
from benchmarks.accept.traces import Logits, Outside, Trace, compiled, sentence, uncompiled, worst

SETTLED = 8
"""Steps at the end of a request in which nothing may be compiled that stock does not compile."""


def stock_trace(subject: Any, requests: Sequence[Any]) -> Trace | None:
    """Return how often stock torch.compile compiles the same requests; None where it fails."""
    for lowered in (False, True):
        made: list[int] = []
        lower = lookup_backend("aot_eager_decomp_partition") if lowered else None

        def keep(module: Any, inputs: Any, made: list[int] = made, lower: Any = lower, **options: Any) -> Any:
            made.append(1)
            return module.forward if lower is None else lower(module, inputs)

        torch._dynamo.reset()
        try:
            return compiled(subject.copied(), requests, keep, lambda made=made: len(made))[0]
        except Exception:
            continue
    return None


def more(ours: Trace, stock: Trace) -> bool:
    """Return whether this backend compiles in settled steps where stock does not, or more than twice as often in all."""
    settled = any(
        len(a) > SETTLED and sum(a[-SETTLED:]) > sum(b[-SETTLED:]) for a, b in zip(ours.compiled, stock.compiled, strict=True)
    )
    return settled or ours.total > 2 * stock.total


def counts(trace: Trace) -> str:
    return " and ".join("[" + " ".join(map(str, _trimmed(counts))) + "]" for counts in trace.compiled)


def _trimmed(counts: list[int]) -> list[int]:
    last = max((index for index, count in enumerate(counts) if count), default=0)
    return counts[: last + 1]


def stock_logits(subject: Any, requests: Sequence[Any]) -> list[Logits]:
    """Return the logits of stock torch.compile over the requests' own tokens, whatever generate would choose."""
    torch._dynamo.reset()
    twin = subject.copied()
    if not subject.case.caching.generates:
        return compiled(twin, requests, "inductor", lambda: 0)[0].logits
    twin.model.forward = torch.compile(twin.model.forward, mode=subject.case.mode.argument)
    return [twin.generated(request, forced=True)[0] for request in requests]


def stock_runs(subject: Any, requests: Sequence[Any]) -> None:
    """Raise Outside where the uncompiled model or stock torch.compile fails on some requests."""
    try:
        uncompiled(subject, requests)
    except Exception as plain:
        raise Outside(f"the uncompiled model: {sentence(plain)}") from plain
    try:
        torch._dynamo.reset()
        compiled(subject.copied(), requests, "inductor", lambda: 0)
    except Exception as stock:
        raise Outside(sentence(stock)) from stock


def wrong(subject: Any, requests: Sequence[Any], verdict: Verdict) -> dict[str, Any]:
    """Return outcome and detail of a wrong trace: outside where stock Inductor is as wrong by its own measure."""
    said = f"off by {verdict.error:.1e} at {verdict.step}, allowed {verdict.tolerance:.1e}"
    try:
        stock = stock_logits(subject, requests)
        plain = uncompiled(wider(subject), requests)
        eager = worst(plain, uncompiled(subject, requests))
    except Exception:
        return {"outcome": Outcome.WRONG, "detail": said}
    off = worst(plain, stock)
    if off <= 2 * eager + ROUNDING[subject.case.dtype] or not off >= verdict.error / 2:
        return {"outcome": Outcome.WRONG, "detail": said}
    return {"outcome": Outcome.OUTSIDE, "detail": f"stock torch.compile is off by {off:.1e}; this backend: {said}"}
