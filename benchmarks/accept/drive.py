"""Drive: run one case in this process, the compiled model beside its references, and return what came of it.

Two requests go through one compiled model, each with a cache of its own. The same tokens go through the references:
``high`` is the oracle in a wider dtype, ``low`` the oracle in the case's own. The compiled model is right where its error
against ``high`` is at most twice that of ``low``, plus a rounding band, at its worst step and at its median step.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

import kvcompile
from benchmarks.accept.axes import Case, Dtype, Prompt, Scheme, Trait
from benchmarks.accept.cases import refusal
from benchmarks.accept.modules import Module
from benchmarks.accept.oracles import Oracle, scheme_of
from benchmarks.accept.outcomes import Outcome, Result
from benchmarks.accept.subjects import AGAIN, LAYERS, PROMPT, Request, Words, quiet

ROUNDING = {Dtype.BF16: 2.0**-8, Dtype.FP16: 2.0**-11, Dtype.FP32: 2.0**-16}
"""Of the logits' norm: what a sum in another order may add where the uncompiled model happens to be exact."""
SHARE = 0.1
"""Of the control error: a value whose code is rounded to the other side, which the references may not have at the same step."""
SETTLED = 8
"""Steps at the end of a request in which nothing may be compiled that stock does not compile."""
GRAPHS = 64

Logits = list[torch.Tensor]


class Reference(enum.Enum):
    """What the compiled model is held to."""

    EXACT = "the uncompiled model over a cache that has been through encode and decode"
    DEFINITION = "the rewritten graph, run uncompiled by the operations' eager definitions"
    BOUNDED = "the uncompiled model, within twice what the scheme's rounding moves it"


@dataclass
class Trace:
    """Logits and numbers of compiled graphs of one model over both requests."""

    logits: list[Logits] = field(default_factory=list)
    compiled: list[list[int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the number of graphs compiled."""
        return sum(map(sum, self.compiled))


@dataclass(frozen=True)
class Verdict:
    """The worst step of a compiled trace against one reference."""

    error: float
    tolerance: float
    eager: float
    control: float
    step: str

    @property
    def right(self) -> bool:
        """Return whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """Return the error as a multiple of what is allowed; infinite where it is NaN."""
        return self.error / self.tolerance if self.error == self.error else float("inf")


class Outside(Exception):
    """Raised where a case says nothing about this backend."""


def reference_of(case: Case) -> Reference:
    """Return what a case is held to."""
    if case.scheme is Scheme.CERTIFIED:
        return Reference.BOUNDED
    if case.scheme.windowed and Trait.MODULE in case.architecture.traits:
        return Reference.DEFINITION
    # Its keys depend on the queries of the compiled prompt, which no cache shows.
    if case.scheme is Scheme.SQUAT and case.prompt is Prompt.COMPILED:
        return Reference.DEFINITION
    return Reference.EXACT


def run_case(case: Case, layers: int = LAYERS, *, raises: bool = False) -> Result:
    """Return the result of a case over a model of ``layers`` layers; ``raises`` lets the exception of a crash through."""
    started = time.perf_counter()
    try:
        with quiet(), _fresh():
            result = _judged(case, layers, raises)
    except Outside as reason:
        result = Result(case.id, Outcome.OUTSIDE, str(reason))
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return replace(result, seconds=round(time.perf_counter() - started, 1))


def _judged(case: Case, layers: int, raises: bool) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = _built(case, device, layers)
    requests = [subject.request(7), subject.request(8, PROMPT if case.prompt is Prompt.COMPILED else AGAIN, 24)]
    owner = kvcompile.backend(case.scheme.spell(int(case.head_dim)))
    ours = subject.copied()
    try:
        trace, requests = compiled(ours, requests, owner, lambda: len(owner.graphs))
    except Exception as error:
        if raises:
            raise
        _outside_if_stock_fails(subject, requests, error)
        return Result(case.id, Outcome.CRASHED, sentence(error))
    found = Result(
        case.id, Outcome.RIGHT, sites=max((len(graph.sites) for graph in owner.graphs), default=0), graphs=trace.total,
        refused=tuple(dict.fromkeys(item.reason for graph in owner.graphs for item in graph.refusals)),
    )
    del ours
    verdict = _verdict(subject, requests, trace)
    found = replace(
        found, error=verdict.error, tolerance=verdict.tolerance, eager=verdict.eager, control=verdict.control, step=verdict.step
    )
    if not verdict.right:
        return replace(found, **_wrong(subject, requests, verdict))
    announced = refusal(case)
    if (found.refused or not found.sites) and announced is None:
        return replace(found, outcome=Outcome.REFUSED_WRONGLY, detail=found.refused[0] if found.refused else "nothing was rewritten")
    stock = _stock(subject, requests)
    found = replace(found, stock=stock.total if stock is not None else None)
    if stock is not None and _more(trace, stock):
        return replace(found, outcome=Outcome.RECOMPILES, detail=f"{_counts(trace)} against stock {_counts(stock)}")
    return replace(found, outcome=Outcome.REFUSED, detail=announced or "") if found.refused else found


def _built(case: Case, device: torch.device, layers: int) -> Words | Module:
    if Trait.MODULE in case.architecture.traits:
        return Module.build(case, device)
    try:
        return Words.build(case, device, layers)
    except KeyError as error:
        raise Outside(f"this transformers has no {error}") from error
    except Exception as error:
        raise Outside(f"cannot be built: {sentence(error)}") from error


# --- running ------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Forget what was compiled before, and lift the limit at which Dynamo gives up and runs the model as it is."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=8 * GRAPHS):
        yield


# --- references ---------------------------------------------------------------------------------------------


def _wider(subject: Any) -> Any:
    """Return the subject in float32; one in float32 is its own reference, as a float64 model would have other codes."""
    return subject if subject.case.dtype is Dtype.FP32 else subject.copied(torch.float32)


def _verdict(subject: Any, requests: Sequence[Any], trace: Trace) -> Verdict:
    """Return the verdict on the worst request of a trace, each by its nearest reference; raises Outside where there is none."""
    try:
        high = _wider(subject)
        plain = uncompiled(high, requests)
    except Exception as error:
        raise Outside(f"the uncompiled model fails: {sentence(error)}") from error
    allowed = list(_references(subject, high, plain, requests))
    if not all(torch.isfinite(item).all() for expected, own, _ in allowed for logits in (*expected, *own) for item in logits):
        raise Outside("the uncompiled model's logits are not finite")
    found = []
    for number, logits in enumerate(trace.logits):
        verdicts = [_compared(subject.case, number, logits, wide[number], own[number], control) for wide, own, control in allowed]
        found.append(min(verdicts, key=lambda item: item.excess))
    return max(found, key=lambda item: item.excess)


def _compared(case: Case, number: int, logits: Logits, expected: Logits, own: Logits, control: float) -> Verdict:
    """Return the verdict on one request: its worst step, or its median step where that is further beyond what is allowed to it."""
    slack = ROUNDING[case.dtype] + (2 if reference_of(case) is Reference.BOUNDED else SHARE) * control
    ours, eager = errors(expected, logits), errors(expected, own)
    step = max(range(len(ours)), key=lambda index: ours[index] if ours[index] == ours[index] else float("inf"))
    worst_step = Verdict(ours[step], 2 * max(eager) + slack, max(eager), control, f"request {number + 1} step {step}")
    # A value whose code is rounded to the other side shows at some steps; a wrong kernel shows at most of them.
    median = Verdict(_median(ours), 2 * _median(eager) + slack, _median(eager), control, f"request {number + 1}, median step")
    return max(worst_step, median, key=lambda item: item.excess)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _references(
    subject: Any, high: Any, plain: list[Logits], requests: Sequence[Any]
) -> Iterator[tuple[list[Logits], list[Logits], float]]:
    """Return (logits in the wider dtype, logits in the case's dtype, control error) of every reference that is allowed."""
    case, kind = subject.case, reference_of(subject.case)
    if case.scheme is Scheme.DENSE:
        yield plain, plain if high is subject else uncompiled(subject, requests), 0.0
        return
    if kind is Reference.DEFINITION or (kind is Reference.BOUNDED and isinstance(subject, Module)):
        expected = _definition(high, requests)
        control = worst(plain, expected)
        if kind is Reference.BOUNDED:
            yield plain, uncompiled(subject, requests), control
        else:
            yield expected, expected if high is subject else _definition(subject, requests), control
        return
    for codes_in_prompt in (False, True):
        expected = _over_codes(high, requests, codes_in_prompt)
        control = worst(plain, expected)
        if kind is Reference.BOUNDED:
            yield plain, uncompiled(subject, requests), control
            return
        yield expected, expected if high is subject else _over_codes(subject, requests, codes_in_prompt), control
        if case.scheme.windowed:
            return


def _over_codes(subject: Any, requests: Sequence[Any], codes_in_prompt: bool) -> list[Logits]:
    if isinstance(subject, Words):
        with Oracle(subject.case, codes_in_prompt).on(subject.model):
            return uncompiled(subject, requests)
    found = []
    for request in requests:
        fresh = subject.copied()
        with fresh.rounded(lambda role: scheme_of(subject.case, role)):
            logits = fresh.logits(request, fresh.model, fresh.model)
        # Keys and values of one layer do not depend on its attention: only the prompt's own output does.
        first = logits[0] if codes_in_prompt else uncompiled(subject, [request])[0][0]
        found.append([first, *logits[1:]])
    return found


def _definition(subject: Any, requests: Sequence[Any]) -> list[Logits]:
    """Return the logits of the rewritten graph run by the eager definitions of its operations, over given tokens."""
    case = subject.case
    torch._dynamo.reset()
    owner = kvcompile.backend(case.scheme.spell(int(case.head_dim)), inner="eager")
    twin = subject.copied()
    if case.caching.generates:
        twin.model.forward = torch.compile(twin.model.forward, backend=owner)
        return [twin.generated(request, forced=True)[0] for request in requests]
    return compiled(twin, requests, owner, lambda: 0)[0].logits


def errors(expected: Logits, found: Logits) -> list[float]:
    """Return the largest relative error of a row's logits at each step; NaN at all where the numbers of steps differ."""
    if len(expected) != len(found):
        return [float("nan")]
    pairs = zip(expected, found, strict=True)
    return [((a.double() - b.double()).norm(dim=-1) / a.double().norm(dim=-1).clamp(min=1e-12)).max().item() for a, b in pairs]


def worst(expected: list[Logits], found: list[Logits]) -> float:
    """Return the largest relative error of one row's logits over all steps of all requests."""
    return max(error for wanted, given in zip(expected, found, strict=True) for error in errors(wanted, given))


# --- stock --------------------------------------------------------------------------------------------------


def _stock(subject: Any, requests: Sequence[Any]) -> Trace | None:
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


def _more(ours: Trace, stock: Trace) -> bool:
    """Return whether this backend compiles in settled steps where stock does not, or more than twice as often in all."""
    settled = any(
        len(a) > SETTLED and sum(a[-SETTLED:]) > sum(b[-SETTLED:]) for a, b in zip(ours.compiled, stock.compiled, strict=True)
    )
    return settled or ours.total > 2 * stock.total


def _counts(trace: Trace) -> str:
    return " and ".join("[" + " ".join(map(str, _trimmed(counts))) + "]" for counts in trace.compiled)


def _trimmed(counts: list[int]) -> list[int]:
    last = max((index for index, count in enumerate(counts) if count), default=0)
    return counts[: last + 1]


def _stock_logits(subject: Any, requests: Sequence[Any]) -> list[Logits]:
    torch._dynamo.reset()
    return compiled(subject.copied(), requests, "inductor", lambda: 0)[0].logits


def _outside_if_stock_fails(subject: Any, requests: Sequence[Any], error: Exception) -> None:
    """Raise Outside where the uncompiled model or stock torch.compile fails on the same requests too."""
    try:
        uncompiled(subject, requests)
    except Exception as plain:
        raise Outside(f"the uncompiled model fails: {sentence(plain)}") from plain
    try:
        _stock_logits(subject, requests)
    except Exception as stock:
        raise Outside(f"stock torch.compile fails: {sentence(stock)}; this backend: {sentence(error)}") from stock


def _wrong(subject: Any, requests: Sequence[Any], verdict: Verdict) -> dict[str, Any]:
    """Return outcome and detail of a wrong trace: outside where stock Inductor is as wrong by its own measure."""
    said = f"off by {verdict.error:.1e} at {verdict.step}, allowed {verdict.tolerance:.1e}"
    if subject.case.caching.generates:
        return {"outcome": Outcome.WRONG, "detail": said}
    try:
        stock = _stock_logits(subject, requests)
        plain = uncompiled(_wider(subject), requests)
        eager = worst(plain, uncompiled(subject, requests))
    except Exception:
        return {"outcome": Outcome.WRONG, "detail": said}
    off = worst(plain, stock)
    if off <= 2 * eager + ROUNDING[subject.case.dtype] or not off >= verdict.error / 2:
        return {"outcome": Outcome.WRONG, "detail": said}
    return {"outcome": Outcome.OUTSIDE, "detail": f"stock torch.compile is off by {off:.1e}; this backend: {said}"}


def sentence(error: BaseException) -> str:
    """Return the class and the first line of an exception."""
    inner = getattr(error, "inner_exception", error)
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0] if lines else ''}"[:300]
