"""Trial: runs one architecture with one kind of cache and one attention, compiled and uncompiled, and compares the logits.

Three runs over the same tokens: uncompiled, stock ``torch.compile`` (to know whether the model can be captured and how often it compiles),
and this backend. ``survey_table`` prints the results.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.backend import Backend, backend
from kvcompile.passes.graph.dynamo import lookup_backend, many_versions
from kvcompile.passes.match.sites import Refusal
from kvcompile.report import short_paths
from kvcompile.tools.cli.architectures import TinyModel, build
from kvcompile.tools.cli.control import rounded

log = logging.getLogger(__name__)

PADS = (4, 0, 1)
"""Left padding of row i, modulo three, in a batch of several rows."""
SETTLED = 8
"""Last steps of a run, in which this backend may compile nothing that stock does not."""
DENSE_BOUND = 5e-5
"""Largest difference of logits, relative to the largest logit, that counts as rounding: float32 sums in another order."""
GRAPHS = 64


class CaseOutcome(enum.Enum):
    """The outcome of one case."""

    REWRITTEN = "rewritten at every site"
    PARTLY = "some sites refused"
    REFUSED = "every site refused"
    WRONG = "wrong"
    FAILED = "failed"
    RECOMPILES = "compiles more often than stock"
    NO_CACHE = "no softmax attention over a cache"
    NOT_CAPTURED = "stock torch.compile fails"
    NOT_RUN = "the model itself fails"

    @property
    def outside(self) -> bool:
        """Whether the outcome does not depend on this backend: no attention over a cache, or the model or stock torch.compile fails."""
        return self in {CaseOutcome.NO_CACHE, CaseOutcome.NOT_CAPTURED, CaseOutcome.NOT_RUN}


@dataclass(frozen=True)
class TrialSettings:
    """Settings for running every case: batch sizes, prompt length, steps, layers.

    ``scheme``: the scheme tried after ``dense``; ``bound``: the limit of its error.
    """

    scheme: str = "int8"
    rows: tuple[int, ...] = (1, 3)
    prompt: int = 10
    steps: int = 16
    layers: int = 2
    bound: float = 0.1
    compare_stock: bool = True


@dataclass(frozen=True)
class Case:
    """One case of the survey, and one row of its JSON."""

    architecture: str
    cache: str
    attention: str
    outcome: str = ""
    detail: str = ""
    sites: int = 0
    refused: tuple[str, ...] = ()
    reasons: tuple[dict[str, str], ...] = ()
    uncached: int = 0
    error_dense: float | None = None
    error_scheme: float | None = None
    error_stock: float | None = None
    graphs: int = 0
    stock_graphs: int = 0
    seconds: float = 0.0
    idioms: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the case as plain data, for JSON."""
        return asdict(self)


class _NoCache(Exception):
    """Raised if a model returns no cache of keys and values."""


@dataclass
class TrialRun:
    """Logits of the last position of every call, and the number of graphs that each call compiled."""

    logits: list[torch.Tensor] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)


def cases(name: str, caches: Sequence[str], attentions: Sequence[str], settings: TrialSettings) -> Iterator[Case]:
    """Yield every case of one architecture; an exception becomes the outcome of its case."""
    for attention in attentions:
        try:
            with _quiet():
                subject = build(name, attention, settings.layers)
        except Exception as error:
            log.debug("%s could not be built", name, exc_info=True)
            for cache in caches:
                yield Case(name, cache, attention, CaseOutcome.NOT_RUN.value, f"cannot be built: {_sentence(error)}")
            continue
        for cache in caches:
            started = time.perf_counter()
            with _quiet():
                case = _case(subject, Case(name, cache, attention), settings)
            yield replace(case, seconds=round(time.perf_counter() - started, 2))


def _case(subject: TinyModel, case: Case, settings: TrialSettings) -> Case:
    for rows in settings.rows:
        case = _at_batch(subject, case, rows, settings)
        if case.outcome not in {"", CaseOutcome.REWRITTEN.value, CaseOutcome.PARTLY.value, CaseOutcome.REFUSED.value}:
            return replace(case, detail=f"{case.detail} (batch {rows})")
    return case


def _at_batch(subject: TinyModel, case: Case, rows: int, settings: TrialSettings) -> Case:
    try:
        plain = run(subject, subject.model, case.cache, rows, settings, lambda: 0)
    except _NoCache:
        return replace(case, outcome=CaseOutcome.NO_CACHE.value, detail="it returns no cache of keys and values")
    except Exception as error:
        log.debug("the uncompiled model fails", exc_info=True)
        return replace(case, outcome=CaseOutcome.NOT_RUN.value, detail=_sentence(error))
    if not all(torch.isfinite(item).all() for item in plain.logits):
        return replace(case, outcome=CaseOutcome.NOT_RUN.value, detail="its logits are not finite")
    stock = TrialRun()
    if settings.compare_stock:
        try:
            stock = _stock(subject, case.cache, rows, settings)
        except Exception as error:
            log.debug("stock torch.compile fails", exc_info=True)
            return replace(case, outcome=CaseOutcome.NOT_CAPTURED.value, detail=_sentence(error))
        off = _difference(plain, stock)
        case = replace(case, error_stock=_larger(case.error_stock, off), stock_graphs=max(case.stock_graphs, sum(stock.compiled)))
        if off > DENSE_BOUND:
            detail = f"its logits are off by {off:.1e} under stock torch.compile"
            return replace(case, outcome=CaseOutcome.NOT_CAPTURED.value, detail=detail)
    try:
        dense, owner = _ours(subject, case.cache, rows, settings, "dense")
        case = _judged(_noted(case, owner), subject, rows, plain, stock, dense, settings)
        if case.outcome == CaseOutcome.WRONG.value or not case.sites or settings.scheme == "dense":
            return case
        coarse, _ = _ours(subject, case.cache, rows, settings, settings.scheme)
    except Exception as error:
        log.debug("this backend fails", exc_info=True)
        return replace(case, outcome=CaseOutcome.FAILED.value, detail=_sentence(error))
    off = _difference(plain, coarse)
    case = replace(case, error_scheme=_larger(case.error_scheme, off))
    if off <= settings.bound:
        return case
    moved = _sensitivity(subject, case, rows, settings, plain)
    said = f"logits off by {off:.1e} with {settings.scheme}, by {moved:.1e} where the uncompiled model's keys and values are rounded so"
    return replace(case, detail=said) if off <= 2 * moved else replace(case, outcome=CaseOutcome.WRONG.value, detail=said)


def _sensitivity(subject: TinyModel, case: Case, rows: int, settings: TrialSettings, plain: TrialRun) -> float:
    """Return by how much the uncompiled model's logits change, relative to the largest, if keys and values are rounded as by the scheme.

    0 for a scheme that does not encode tokens one by one.
    """
    scheme = schemes.parse(settings.scheme)
    if not scheme.by_token:
        return 0.0
    with rounded(scheme):
        return _difference(plain, run(subject, subject.model, case.cache, rows, settings, lambda: 0))


def _judged(case: Case, subject: TinyModel, rows: int, plain: TrialRun, stock: TrialRun, dense: TrialRun, settings: TrialSettings) -> Case:
    off = _difference(plain, dense)
    case = replace(case, error_dense=_larger(case.error_dense, off), graphs=max(case.graphs, sum(dense.compiled)))
    if not off <= DENSE_BOUND:
        return replace(case, outcome=CaseOutcome.WRONG.value, detail=f"logits off by {off:.1e} with dense")
    if settings.compare_stock and _more(dense, stock):
        # A stock run that also lowers its graphs has more guards, hence more recompilations: compare with that before judging.
        stock = _stock(subject, case.cache, rows, settings, lowered=True)
        case = replace(case, stock_graphs=max(case.stock_graphs, sum(stock.compiled)))
        if _more(dense, stock):
            return replace(
                case, outcome=CaseOutcome.RECOMPILES.value, detail=f"per call {dense.compiled}, stock {stock.compiled}",
            )
    if not case.sites and not case.reasons:
        return replace(case, outcome=CaseOutcome.NO_CACHE.value, detail=f"{case.uncached} attentions without a cache")
    full = CaseOutcome.REWRITTEN if not case.reasons else CaseOutcome.PARTLY if case.sites else CaseOutcome.REFUSED
    return replace(case, outcome=full.value)


def _more(ours: TrialRun, stock: TrialRun) -> bool:
    """Return whether this backend compiles more graphs than stock in the last SETTLED steps, or more than twice as many overall."""
    return sum(ours.compiled[-SETTLED:]) > sum(stock.compiled[-SETTLED:]) or sum(ours.compiled) > 2 * sum(stock.compiled)


def _noted(case: Case, owner: Backend) -> Case:
    """Return the case with the numbers of sites and the refusals of a backend's graphs added, each refusal once."""
    graphs = owner.graphs
    refusals = [refusal for graph in graphs for refusal in graph.refusals]
    unique = {(refusal.path, refusal.reason): refusal for refusal in refusals}
    known = {(item["path"], item["reason"]) for item in case.reasons}
    found = tuple(_plain(refusal) for key, refusal in unique.items() if key not in known)
    reasons = case.reasons + found
    return replace(
        case, sites=max([case.sites, *(len(graph.sites) for graph in graphs)]), reasons=reasons,
        refused=tuple(dict.fromkeys(item["reason"] for item in reasons)),
        uncached=max([case.uncached, *(graph.uncached for graph in graphs)]),
        idioms=tuple(sorted({*case.idioms, *(f"{s.write} > {s.idiom} > {s.mask}" for graph in graphs for s in graph.sites)})),
    )


def _plain(refusal: Refusal) -> dict[str, str]:
    return {
        "path": refusal.path, "reason": refusal.reason, "line": short_paths(refusal.line), "nearest": refusal.nearest,
        "advice": refusal.advice, "evidence": "; ".join(refusal.evidence)[:400],
    }


# --- runs -----------------------------------------------------------------------------------------------


@torch.no_grad()
def run(
    subject: TinyModel, call: Callable[..., Any], cache: str, rows: int, settings: TrialSettings, compiled: Callable[[], int]
) -> TrialRun:
    """Run prefill and decode steps with ``call``; return the last token's logits and the number of new graphs of each call.

    ``compiled`` returns the number of graphs so far. Raises _NoCache if the model returns no cache.
    """
    total = settings.prompt + settings.steps
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(3, subject.vocabulary, (rows, total), generator=generator, device="cpu")
    mask = None
    if rows > 1:
        mask = torch.ones(rows, total, dtype=torch.long, device="cpu")
        for row in range(rows):
            mask[row, : PADS[row % len(PADS)]] = 0
    past = subject.static_cache(total + 6) if cache == "static" else subject.dynamic_cache()
    found = TrialRun()
    start, before = 0, compiled()
    for stop in range(settings.prompt, total + 1):
        seen = None if mask is None else mask[:, :stop]
        out = call(**subject.inputs(words[:, start:stop], seen), past_key_values=past, use_cache=True)
        past = getattr(out, "past_key_values", None)
        if past is None:
            raise _NoCache
        found.logits.append(out.logits[:, -1].float().clone())
        found.compiled.append(compiled() - before)
        start, before = stop, compiled()
    return found


def _stock(subject: TinyModel, cache: str, rows: int, settings: TrialSettings, lowered: bool = False) -> TrialRun:
    """Return the run of the case under stock ``torch.compile``.

    ``lowered``: down to Inductor's operations, which adds guards.
    """
    made: list[Any] = []
    lower = lookup_backend("aot_eager_decomp_partition") if lowered else None

    def keep(module: Any, inputs: Any) -> Any:
        made.append(1)
        return module.forward if lower is None else lower(module, inputs)

    with _fresh():
        return run(subject, torch.compile(subject.model, backend=keep), cache, rows, settings, lambda: len(made))


def _ours(subject: TinyModel, cache: str, rows: int, settings: TrialSettings, scheme: str) -> tuple[TrialRun, Backend]:
    owner = backend(scheme, inner="eager")
    with _fresh():
        found = run(subject, torch.compile(subject.model, backend=owner), cache, rows, settings, lambda: len(owner.graphs))
    return found, owner


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Within the context, Dynamo starts without compiled code and recompiles up to ``GRAPHS`` times before it gives up."""
    torch.compiler.reset()
    with many_versions(GRAPHS):
        yield


def _difference(expected: TrialRun, found: TrialRun) -> float:
    """Return the largest difference of logits over all calls, relative to the largest logit; infinite for NaN."""
    largest = max(float(item.abs().max()) for item in expected.logits)
    worst = max(float((a - b).abs().max()) for a, b in zip(expected.logits, found.logits, strict=True))
    return worst / max(largest, 1e-6) if worst == worst else float("inf")


def _larger(a: float | None, b: float) -> float:
    return b if a is None else max(a, b)


def _sentence(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)
    lines = str(inner).strip().splitlines()
    return short_paths(f"{type(inner).__name__}: {lines[0] if lines else ''}")[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as hub

    level = hub.get_verbosity()
    hub.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.set_verbosity(level)
