"""Programs of the fuzzer whose outcome is known: what is rewritten stays rewritten, what is refused stays refused."""

from __future__ import annotations

import pytest

from benchmarks.fuzz.known import Known, read
from benchmarks.fuzz.trial import Found, tried

KNOWN = read()


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.mark.parametrize("program", KNOWN, ids=lambda program: str(program.seed))
def test_a_program_ends_as_it_did(program: Known) -> None:
    result = tried(program.seed, program.choice)
    assert result.found is program.found, f"{program.choice}: {result.said}"


def test_both_outcomes_are_known() -> None:
    assert {program.found for program in KNOWN} == {Found.RIGHT, Found.REFUSED}
