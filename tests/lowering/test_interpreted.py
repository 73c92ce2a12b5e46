"""What runs tests in Triton's interpreter: failures come back, an end is no success, and nothing patched reaches the next call."""

from __future__ import annotations

import os

import pytest
from interpreted import interpreted

pytest.importorskip("triton")


def expect(wanted: object) -> None:
    from triton.runtime import interpreter

    found = getattr(interpreter, "patched_by_a_test", None)
    interpreter.patched_by_a_test = True
    assert found == wanted, f"found {found}"


def test_failures_come_back_and_patches_do_not() -> None:
    interpreted(expect, None)
    with pytest.raises(AssertionError, match="found None"):
        interpreted(expect, True)


def test_an_end_without_an_answer_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="ended with 3"):
        interpreted(os._exit, 3)
