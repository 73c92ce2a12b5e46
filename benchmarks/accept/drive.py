"""Drive: run one case in this process, two requests through one compiled model beside its references, and return what came of it."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import kvcompile
from benchmarks.accept.axes import Case, Mode, Prompt, Trait
from benchmarks.accept.cases import refusal
from benchmarks.accept.modules import Module
from benchmarks.accept.outcomes import Outcome, Result
from benchmarks.accept.references import verdict_on
from benchmarks.accept.stock import counts, more, stock_runs, stock_trace, wrong
from benchmarks.accept.subjects import LAYERS, LONG, SHORT, Words, quiet
from benchmarks.accept.traces import Outside, compiled, fresh, sentence

AGAIN = 24
"""Steps of the second request."""
OURS_ALONE = {"max_autotune_gemm_backends": "ATEN", "coordinate_descent_tuning": False}
"""Under max-autotune our kernels' tilings are measured and chosen; tuning torch's own kernels is most of the time and tests torch."""


def run_case(case: Case, layers: int = LAYERS, *, raises: bool = False) -> Result:
    """Return the result of a case over a model of ``layers`` layers; ``raises`` lets the exception of a crash through."""
    started, spent = time.perf_counter(), Spent()
    try:
        with quiet(), fresh():
            result = _judged(case, layers, raises, spent)
    except Outside as reason:
        result = Result(case.id, Outcome.OUTSIDE, str(reason))
    except Exception as error:
        # A fault of the references must not end the worker, and the cases that it would run next.
        if raises:
            raise
        result = Result(case.id, Outcome.CRASHED, f"while judging: {sentence(error)}", trace=_trace(error))
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return replace(result, seconds=round(time.perf_counter() - started, 1), spent=spent.seconds)


def run_stock(case: Case, layers: int = LAYERS) -> Result:
    """Return whether stock torch.compile alone runs a case's requests: right where it does, outside where it fails; nothing is compared."""
    try:
        with quiet(), fresh():
            subject = _built(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"), layers)
            stock_runs(subject, _requests(subject))
    except Outside as reason:
        return Result(case.id, Outcome.OUTSIDE, str(reason))
    return Result(case.id, Outcome.RIGHT)


def _requests(subject: Any) -> list[Any]:
    case = subject.case
    first, second = (SHORT, LONG) if Trait.SLIDING in case.architecture.traits else (LONG, SHORT)
    # A prompt of another length costs a compilation where it is compiled.
    return [subject.request(7, first), subject.request(8, first if case.prompt is Prompt.COMPILED else second, AGAIN)]


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the device's allocator gives out next, so that a kernel that reads what nobody wrote is noticed."""
    if device.type == "cuda":
        # Tensors below one MiB have a pool of their own.
        sizes = (1 << 26, *[1 << 17] * 64)
        held = [torch.full((size,), float("nan"), device=device) for size in sizes]
        del held


class Spent:
    """Seconds by phase of a case: what a slow run spends its time on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Count what runs inside to ``phase``, also where it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - started, 1)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Note what torch's clock counts inside, by its own names, which lie in one another."""
        torch._dynamo.utils.compilation_time_metrics.clear()
        try:
            yield
        finally:
            times = torch._dynamo.utils.compilation_time_metrics.items()
            self.seconds |= {f"ours: {name}": round(sum(each), 1) for name, each in times if sum(each) >= 1}


def _judged(case: Case, layers: int, raises: bool, spent: Spent) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with spent.on("build"):
        subject = _built(case, device, layers)
    requests = _requests(subject)
    owner = kvcompile.backend(case.scheme.spec(int(case.head_dim)), options=OURS_ALONE if case.mode is Mode.MAX_AUTOTUNE else None)
    ours = subject.copied()
    poison(device)
    try:
        with spent.on("ours"), spent.compiling():
            trace, requests = compiled(ours, requests, owner, lambda: len(owner.graphs))
    except Exception as error:
        if raises:
            raise
        # Whether stock fails too is tried in a new process: a CUDA graph whose capture failed leaves this one unfit.
        return Result(case.id, Outcome.CRASHED, sentence(error), trace=_trace(error))
    found = Result(
        case.id, Outcome.RIGHT, sites=max((len(graph.sites) for graph in owner.graphs), default=0), graphs=trace.total,
        refused=tuple(dict.fromkeys(item.reason for graph in owner.graphs for item in graph.refusals)),
    )
    del ours
    with spent.on("references"):
        verdict = verdict_on(subject, requests, trace, rewritten=found.sites > 0)
    found = replace(
        found, error=verdict.error, tolerance=verdict.tolerance, eager=verdict.eager, control=verdict.control, step=verdict.step
    )
    if not verdict.right:
        return replace(found, **wrong(subject, requests, verdict))
    if not verdict.telling:
        said = f"off by {verdict.error:.1e}, and the uncompiled model in its dtype by {verdict.eager:.1e}: nothing can be told"
        return replace(found, outcome=Outcome.UNDECIDED, detail=said)
    announced = refusal(case)
    if (found.refused or not found.sites) and announced is None:
        return replace(found, outcome=Outcome.REFUSED_WRONGLY, detail=found.refused[0] if found.refused else "nothing was rewritten")
    with spent.on("stock"):
        stock = stock_trace(subject, requests)
    found = replace(found, stock=stock.total if stock is not None else None)
    if stock is not None and more(trace, stock):
        return replace(found, outcome=Outcome.RECOMPILES, detail=f"{counts(trace)} against stock {counts(stock)}")
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
