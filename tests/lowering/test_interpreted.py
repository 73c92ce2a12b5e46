"""What runs tests in Triton's interpreter: failures come back, an end is no success, and nothing patched reaches the next call."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import interpreted as support
import pytest
import torch
from interpreted import interpreted

triton = pytest.importorskip("triton")
tl = triton.language


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


@triton.jit
def copy(X, Y, rows, N: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, N)
    tl.store(Y + i, tl.load(X + i, mask=i < rows), mask=i < rows)


def copy_rows(source: int, target: int) -> None:
    x, y = torch.arange(source, dtype=torch.float32), torch.zeros(target)
    copy[(1,)](x, y, 20, 32)
    assert torch.equal(y[:20], x[:20])


def test_an_access_outside_of_the_tensors_of_a_launch_is_a_failure() -> None:
    interpreted(copy_rows, 20, 20, guarded=True)
    for sizes in ((19, 20), (20, 19)):
        with pytest.raises(AssertionError, match="1 of 20 addresses"):
            interpreted(copy_rows, *sizes, guarded=True)


def multiply(x: int, y: int) -> None:
    assert x * y == 42 and "TRITON_INTERPRET" not in os.environ


def test_another_server_of_the_process_keeps_neither_from_its_own() -> None:
    """Whichever is started first."""
    process = multiprocessing.get_context("forkserver").Process(target=multiply, args=(6, 7))
    process.start()
    process.join()
    assert process.exitcode == 0
    support.started.cache_clear()
    interpreted(copy_rows, 20, 20)
    again = multiprocessing.get_context("forkserver").Process(target=multiply, args=(6, 7))
    again.start()
    again.join()
    assert again.exitcode == 0


def test_two_threads_that_start_it_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # Undone in any case.
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(support.forkserver.ForkServer, "ensure_running", lambda self: time.sleep(0.3))
    support.started.cache_clear()
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: support.interpreting(), range(2)))
    finally:
        support.started.cache_clear()
    assert "TRITON_INTERPRET" not in os.environ
