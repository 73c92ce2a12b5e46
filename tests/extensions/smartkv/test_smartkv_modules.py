"""smartkv over hand-written cached attentions of every kind: as near to the module as eight bits are, or refused and equal to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_models import CASES, Case
from sliding_models import SLIDING_CASES

import kvcompile
from kvcompile.extensions.smartkv import clock, reallocation
from kvcompile.extensions.smartkv import scheme as scheme_module

ALL = tuple({case.name: case for case in (*CASES, *SLIDING_CASES)}.values())
EIGHT = "smartkv(budget=1.0,keys=8,values=8,tau=0.0)"
REFUSED = {
    "per-row": "separate positions", "row-decode": "separate positions", "row-scatter": "separate positions",
    **dict.fromkeys(("scaled-twice", "scaled-scores-twice", "transposed-keys"), "masked scores are replaced"),
    **dict.fromkeys(("differential-channels", "differential-heads", "differential-concatenated"), "another attention reads too"),
    "first-rows-per-row": "separate positions",
    "block-table": "through a gather", "latent": "made from a cached latent",
    **dict.fromkeys(
        ("rolled", "roll-and-put", "concatenated-back", "combined-roll", "sliced", "sliced-later", "rolled-result"), "keeps its newest",
    ),
}
"""Modules that other schemes rewrite and smartkv refuses, each with a part of the reason."""
DENSE = {"one-minus-mask"}
"""Modules whose mask, a number that is added, may show places behind the newest token: their caches stay dense."""


@pytest.fixture(autouse=True)
def _often(one_thread: None, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widths are decided after every third token, whatever that costs."""
    monkeypatch.setattr(clock, "interval", lambda layer, tokens, base=16: 3)
    monkeypatch.setattr(scheme_module, "EXEMPT", 0)
    reallocation.interval.cache_clear()
    yield
    reallocation.interval.cache_clear()


@pytest.mark.parametrize("case", ALL, ids=str)
def test_near_the_module_or_refused_and_equal(case: Case) -> None:
    backend = kvcompile.backend(EIGHT, inner="eager")
    error = case.error(backend) if case.refused else case.error(backend, dim=32)
    report = backend.report()
    reason = case.refused or REFUSED.get(case.name, "")
    assert bool(report.sites) != bool(reason) and bool(report.refusals) == bool(reason)
    if reason:
        assert error == 0.0 and any(reason in refusal.reason for refusal in report.refusals)
    else:
        assert (error == 0.0) == (case.name in DENSE) and error <= 0.01, error
