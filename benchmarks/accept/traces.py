"""Traces: send requests through a compiled or an uncompiled subject, and compare the logits of every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.accept.axes import Prompt
from benchmarks.accept.modules import Module
from benchmarks.accept.subjects import Request

GRAPHS = 64
"""Graphs after which Dynamo gives up and runs a model as it is."""

Logits = list[torch.Tensor]


@dataclass
class Trace:
    """Logits and numbers of compiled graphs of one model over both requests."""

    logits: list[Logits] = field(default_factory=list)
    compiled: list[list[int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the number of graphs compiled."""
        return sum(map(sum, self.compiled))


class Outside(Exception):
    """Raised where a case says nothing about this backend."""


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Forget what was compiled before, and lift the limit at which Dynamo gives up and runs the model as it is."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=8 * GRAPHS):
        yield


def compiled(subject: Any, requests: Sequence[Any], backend: Any, made: Callable[[], int]) -> tuple[Trace, list[Any]]:
    """Return the trace of a compiled subject, and the requests: where generate chose the tokens, with those."""
    case, trace, seen = subject.case, Trace(), []
    options = {"backend": backend, "mode": case.mode.argument}
    if case.caching.generates:
        subject.model.forward = torch.compile(subject.model.forward, **options)
        for request in requests:
            before = made()
            logits, words = subject.generated(request)
            trace.logits.append(logits)
            trace.compiled.append([made() - before])
            seen.append(Request(words, _longer(request.mask, words), request.prompt))
        return trace, seen
    run = torch.compile(subject.model, **options)
    for number, request in enumerate(requests):
        counts: list[int] = []

        def counted(*args: Any, counts: list[int] = counts, **kwargs: Any) -> Any:
            before = made()
            out = run(*args, **kwargs)
            counts.append(made() - before)
            return out

        # A module's own buffers are compressed by then, and only compiled code may write them.
        eager = case.prompt is Prompt.EAGER and not (number and isinstance(subject, Module))
        trace.logits.append(subject.logits(request, subject.model if eager else counted, counted))
        trace.compiled.append(counts)
    return trace, list(requests)


def _longer(mask: torch.Tensor | None, words: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    return torch.nn.functional.pad(mask[:, : words.shape[1]], (0, max(0, words.shape[1] - mask.shape[1])), value=1)


def uncompiled(subject: Any, requests: Sequence[Any]) -> list[Logits]:
    """Return the logits of a subject as it is, each request on a cache of its own."""
    found = []
    for request in requests:
        fresh = subject.copied() if isinstance(subject, Module) else subject
        if subject.case.caching.generates:
            found.append(fresh.generated(request, forced=True)[0])
        else:
            found.append(fresh.logits(request, fresh.model, fresh.model))
    return found


def errors(expected: Logits, found: Logits) -> list[float]:
    """Return the largest relative error of a row's logits at each step; NaN at all where the numbers of steps differ."""
    if len(expected) != len(found):
        return [float("nan")]
    pairs = zip(expected, found, strict=True)
    return [((a.double() - b.double()).norm(dim=-1) / a.double().norm(dim=-1).clamp(min=1e-12)).max().item() for a, b in pairs]


def worst(expected: list[Logits], found: list[Logits]) -> float:
    """Return the largest relative error of one row's logits over all steps of all requests."""
    return max(error for wanted, given in zip(expected, found, strict=True) for error in errors(wanted, given))


def sentence(error: BaseException) -> str:
    """Return the class and the first line of an exception."""
    inner = getattr(error, "inner_exception", error)
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0] if lines else ''}"[:300]
