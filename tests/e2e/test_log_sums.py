"""Log-sums of scores read beside the attention, in every spelling: right in prompt, decode and a second request, and compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from e2e_models import Case, by_position
from log_sum_models import Cascade, Parts, Returned, TwoCaches, cast, eagerly, flexed, fused, overwritten, silenced, spelled
from torch import nn
from two_requests import ALLOWED, error

import kvcompile

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


def two_caches(module: nn.Module, call: Callable[..., Any], chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """forward(x, *caches), which returns them too."""
    results, caches = [], ()
    for x in chunks:
        y, *caches = call(x, *caches)
        results.append(y)
    return results


CASES = (
    *(Case(f"cascade-{attend.__name__}", lambda attend=attend, **given: Cascade(attend, **given), by_position)
      for attend in (spelled, eagerly, cast, fused, flexed)),
    Case("cascade-grouped", lambda **given: Cascade(spelled, **given), by_position, sizes={"kv": 2}),
    Case("returned-with-sinks", Returned, by_position),
    Case("two-caches", TwoCaches, two_caches),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scheme", ALLOWED)
def test_right_under_every_scheme(case: Case, scheme: str) -> None:
    backend = kvcompile.backend(scheme, inner="eager", strict=True)
    assert (scheme != "dense") * 1e-6 <= error(case, backend) <= ALLOWED[scheme]
    report = backend.report()
    assert report.sites and not report.refusals and not any(graph.unvalidated for graph in report.graphs)


@pytest.mark.compile
@pytest.mark.parametrize("scheme", ALLOWED)
@pytest.mark.parametrize("name", ["cascade-grouped", "two-caches"])
def test_right_through_inductor(name: str, scheme: str) -> None:
    case = next(case for case in CASES if case.name == name)
    backend = kvcompile.backend(scheme, strict=True)
    assert error(case, backend) <= ALLOWED[scheme]
    assert "attend" in str(backend.report().graphs[-1].kernels)


def test_half_precision_keeps_log_sums_exact() -> None:
    """Log-sums are float32 until the model rounds them: in bfloat16 they would move a share by more than its rounding."""
    case = next(case for case in CASES if case.name == "cascade-spelled")
    assert error(case, kvcompile.backend("dense", inner="eager", strict=True), torch.bfloat16) <= 0.02


@pytest.mark.parametrize(("scheme", "found"), [
    ("smartkv", "the attention of smartkv gives none"), ("certified", "the attention of certified gives none"),
])
def test_attentions_without_log_sums_refuse_them(scheme: str, found: str) -> None:
    case = next(case for case in CASES if case.name == "cascade-spelled")
    backend = kvcompile.backend(scheme, inner="eager")
    assert error(case, backend) <= 3e-6
    assert found in str(backend.report().refusals[0])


@pytest.mark.parametrize(("attend", "found"), [
    (silenced, "weights of whole queries are set to zero"), (overwritten, "before the attention is complete, among writes in place"),
])
def test_refused_for_its_reason_and_right(attend: Callable[..., Parts], found: str) -> None:
    backend = kvcompile.backend("int8", inner="eager")
    assert error(Case("cascade", lambda **given: Cascade(attend, **given), by_position), backend) <= 3e-6
    assert found in str(backend.report().refusals[0]) and backend.report().sites == 0
