"""References: what a compiled model's logits are held to, and the verdict on them.

``high`` is the reference in float32, ``low`` the same in the case's own dtype. The compiled model is right where its error
against ``high`` is at most twice that of ``low``, plus a rounding band, at its worst step and at its median step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvcompile
from benchmarks.accept.axes import Case, Dtype, Prompt, Scheme, Trait
from benchmarks.accept.modules import Module
from benchmarks.accept.oracles import Oracle, scheme_of
from benchmarks.accept.subjects import Words
from benchmarks.accept.traces import Logits, Outside, Trace, compiled, errors, sentence, uncompiled, worst

ROUNDING = {Dtype.BF16: 2.0**-8, Dtype.FP16: 2.0**-11, Dtype.FP32: 2.0**-16}
"""Of the logits' norm: what a sum in another order may add where the uncompiled model happens to be exact."""
SHARE = 0.1
"""Of the control error: a value whose code is rounded to the other side, which the references may not have at the same step."""
DECIDED = 0.3
"""Share of the control error for a scheme that decides widths: rounding alone changes a token's rank, and with it all of its codes."""

TELLING = 0.5
"""An error above this is no evidence of anything, whatever is allowed: unrelated logits are off by about 1.4."""


class Reference(enum.Enum):
    """What the compiled model is held to."""

    EXACT = "the uncompiled model over a cache that has been through encode and decode"
    DEFINITION = "the rewritten graph, run uncompiled by the operations' eager definitions"
    BOUNDED = "the uncompiled model, within twice what the scheme's rounding moves it"


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
    def telling(self) -> bool:
        """Return whether the error is so small that it shows the logits to be right, and not only the reference to be vague."""
        return self.error <= TELLING

    @property
    def excess(self) -> float:
        """Return the error as a multiple of what is allowed; infinite where it is NaN."""
        return self.error / self.tolerance if self.error == self.error else float("inf")


def reference_of(case: Case) -> Reference:
    """Return what a case is held to."""
    # Whether a layer that keeps its newest tokens can hold first ones is seen graph by graph: a prompt's may be stored, then dense again.
    if case.scheme is Scheme.CERTIFIED or (case.scheme is Scheme.FIRST and Trait.SLIDING in case.architecture.traits):
        return Reference.BOUNDED
    # What it stores depends on attention, so ``encode`` and ``decode`` are no reference.
    if case.scheme is Scheme.SMARTKV or (case.scheme.windowed and Trait.MODULE in case.architecture.traits):
        return Reference.DEFINITION
    # Its keys depend on the queries of the compiled prompt, which no cache shows.
    if case.scheme is Scheme.SQUAT and case.prompt is Prompt.COMPILED:
        return Reference.DEFINITION
    return Reference.EXACT


def wider(subject: Any) -> Any:
    """Return the subject in float32; one in float32 is its own reference, as a float64 model would have other codes."""
    return subject if subject.case.dtype is Dtype.FP32 else subject.copied(torch.float32)


def verdict_on(subject: Any, requests: Sequence[Any], trace: Trace, *, rewritten: bool = True) -> Verdict:
    """Return the verdict on the worst request of a trace, each by its nearest reference; raises Outside where there is none.

    ``rewritten``: whether any site was; a model whose sites all stayed dense is held to the plain model.
    """
    try:
        high = wider(subject)
        plain = uncompiled(high, requests)
    except Exception as error:
        raise Outside(f"the uncompiled model fails: {sentence(error)}") from error
    allowed = list(_references(subject, high, plain, requests, rewritten))
    if not all(torch.isfinite(item).all() for expected, own, _ in allowed for logits in (*expected, *own) for item in logits):
        raise Outside("the uncompiled model's logits are not finite")
    found = []
    for number, logits in enumerate(trace.logits):
        verdicts = [compared(subject.case, number, logits, wide[number], own[number], control) for wide, own, control in allowed]
        found.append(min(verdicts, key=lambda item: item.excess))
    return max(found, key=lambda item: item.excess)


def compared(case: Case, number: int, logits: Logits, expected: Logits, own: Logits, control: float) -> Verdict:
    """Return the verdict on one request: its worst step, or its median step where that is further beyond what is allowed to it."""
    share = 2 if reference_of(case) is Reference.BOUNDED else DECIDED if case.scheme is Scheme.SMARTKV else SHARE
    slack = ROUNDING[case.dtype] + share * control
    ours, eager = errors(expected, logits), errors(expected, own)
    step = max(range(len(ours)), key=lambda index: ours[index] if ours[index] == ours[index] else float("inf"))
    worst_step = Verdict(ours[step], 2 * max(eager) + slack, max(eager), control, f"request {number + 1} step {step}")
    # A value whose code is rounded to the other side shows at some steps; a wrong kernel shows at most of them.
    median = Verdict(_median(ours), 2 * _median(eager) + slack, _median(eager), control, f"request {number + 1}, median step")
    return max(worst_step, median, key=lambda item: item.excess)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _references(
    subject: Any, high: Any, plain: list[Logits], requests: Sequence[Any], rewritten: bool
) -> Iterator[tuple[list[Logits], list[Logits], float]]:
    """Return (logits in the wider dtype, logits in the case's dtype, control error) of every reference that is allowed."""
    case, kind = subject.case, reference_of(subject.case)
    if case.scheme is Scheme.DENSE or not rewritten:
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
    owner = kvcompile.backend(case.scheme.spec(int(case.head_dim)), inner="eager")
    twin = subject.copied()
    if case.caching.generates:
        twin.model.forward = torch.compile(twin.model.forward, backend=owner)
        return [twin.generated(request, forced=True)[0] for request in requests]
    return compiled(twin, requests, owner, lambda: 0)[0].logits
