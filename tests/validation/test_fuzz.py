"""A fixed slice of the fuzzer (``benchmarks/fuzz``), and all that it ever found."""

from __future__ import annotations

import pytest

import benchmarks.fuzz.__main__ as command
from benchmarks.fuzz import CORPUS, PLAIN, Found, drawn, tried

GOOD = {Found.RIGHT, Found.REFUSED, Found.NOTED, Found.OUTSIDE}
SEEDS = 32


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_module_is_right_or_refused(seed: int) -> None:
    result = tried(seed, drawn(seed))
    assert result.found in GOOD, f"{result.choice}: {result.said}"


@pytest.mark.parametrize(("seed", "choice"), CORPUS)
def test_what_was_found_once_stays_mended(seed: int, choice: dict[str, str]) -> None:
    result = tried(seed, choice)
    assert result.found in GOOD, f"{result.choice}: {result.said}"


def test_the_fuzzer_sees_a_difference() -> None:
    """A cap of the negative scores, which the matcher reads wrongly: found where rewrites are not validated."""
    choice = PLAIN | {"scores": "cap-negative"}
    assert tried(0, choice, validate=False).found is Found.DIFFERENT
    assert tried(0, choice).found is Found.REFUSED


def test_the_slice_holds_both_outcomes() -> None:
    """Plain modules are rewritten: a matcher that refused everything would pass the slice."""
    assert tried(1, PLAIN).found is Found.RIGHT
    assert tried(1, PLAIN | {"layout": "concatenated", "groups": "2", "mask": "window"}).found is Found.RIGHT


def test_the_command_goes_on_when_its_processes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever behind the fifteenth chunk of each process, so no run had more than 300 modules a process."""
    monkeypatch.setattr(command, "CHUNK", 1)
    monkeypatch.setattr(command, "LIFE", 2)
    found = [result for results in command._results(range(3), 1, float("inf")) for result in results]
    assert sorted(result.seed for result in found) == [0, 1, 2]
