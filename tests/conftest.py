"""What all tests share: skips with a reason, few threads, a clean Dynamo, and what the options of ``conftest.py`` above do."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Inductor compiles in this process: workers that it starts import torch again, and the suite has one process a core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A second thread that has nothing to do sleeps: it spins by default, on the core of the suite's other process. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import faster_torch
import pytest
import torch

torch.set_num_threads(2)
# Tracing makes millions of objects that stay: looking through them at Python's default rate is 8% of the suite.
gc.set_threshold(200_000, 20, 50)


def _roomy(run: Callable[[pytest.Function], object]) -> Callable[[pytest.Function], object]:
    """Return ``run`` with memory for all frames under it at once: its own frame asks for 4 MiB, which Python doubles and leaves free.

    Python keeps frames in blocks of 16 KiB, and asks the system for one whenever a call goes over its end and gives it back when the call
    returns: ten thousand times a second where a compiler's recursion comes and goes there, 8% of a test that compiles. What is never
    touched takes no memory.
    """

    def inside(item: pytest.Function) -> object:
        return run(item)

    inside.__code__ = inside.__code__.replace(co_stacksize=1 << 19)
    return inside


pytest.Function.runtest = _roomy(pytest.Function.runtest)  # type: ignore[method-assign, assignment]

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Identifiers of tests that are marked ``slow`` by that list."""

FIRST = ("certified", "triton", "prefill", "chunked", "cpp", "inductor")
"""Parts of the names of tests that compile kernels or interpret them: tens of seconds, so they do not come last."""


def pytest_configure(config: pytest.Config) -> None:
    """Make torch faster for the run, ahead of all that tests import."""
    if not config.getoption("--unpatched"):
        faster_torch.install()
    if config.getoption("--module"):
        os.environ["KVCOMPILE_TRIED_MODULE"] = config.getoption("--module")
    if config.getoption("--scheme"):
        # Read when `registry` is imported, here and in processes that tests start.
        given = config.getoption("--scheme")
        paths = [str(config.invocation_params.dir / text) if text.endswith(".py") else text for text in given]
        os.environ["KVCOMPILE_TRIED_SCHEMES"] = "\n".join(paths)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark ``SLOW`` tests, put long ones first, or any by ``--turn``, and skip those marked ``gpu`` where there is no device.

    With ``--scheme`` those alone are left that have a scheme of it, or a setting of one, as a parameter; with ``--module`` those of it.
    """
    if config.getoption("--scheme") or config.getoption("--module"):
        from registry import concerns

        asked = {item for item in items if any(map(concerns, getattr(getattr(item, "callspec", None), "params", {}).values()))}
        config.hook.pytest_deselected(items=[item for item in items if item not in asked])
        items[:] = [item for item in items if item in asked]
    items.sort(key=lambda item: not any(part in item.nodeid for part in FIRST))
    if config.getoption("--turn"):
        random.Random(config.getoption("--turn")).shuffle(items)
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage that tests ask for need not look through it."""
    gc.collect()
    gc.freeze()


STARTED = time.monotonic()
"""When this process read this file, in seconds."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose turn comes after ``--seconds``: a run of long tests then ends on a slow machine too, and says what it left out."""
    limit = item.config.getoption("--seconds")
    if limit and time.monotonic() - STARTED > limit:
        pytest.skip(f"left out: its turn came after the {limit:.0f} seconds of --seconds")


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Free what other files' tests left and look away from the rest: a collection that a test asks for looks at objects of its own file.

    Millions stay in a long session, seconds a collection: a cache machine, which collects often, took 48 s instead of 2.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture
def accept(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written rather than compared."""
    return bool(request.config.getoption("--accept"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors too small to share: on a busy machine two threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, symbol or count of graph breaks left from another test, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def validated_anew() -> Iterator[None]:
    """Verdicts of other processes do not count: a test may have broken what they were reached with."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvcompile.lowering.persistent_keys.PersistentKeys.__contains__", lambda self, key: False)
        yield


@pytest.fixture(autouse=True)
def said_anew() -> None:
    """Clear the warnings that a process gives once, so that every test sees its own."""
    handle = sys.modules.get("kvcompile.runtime.handle.tensor")
    if handle is not None:
        handle.warn_of_eager_use.cache_clear()
        handle.warn_of_densifying.cache_clear()


@pytest.fixture(autouse=True)
def every_rewrite_is_validated(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A site that is rewritten without having been tried fails its test, unless the test is marked ``unvalidated``."""
    yield
    said = [record.getMessage() for record in caplog.get_records("call") if "could not validate" in record.msg]
    assert not said or request.node.get_closest_marker("unvalidated"), said[0]
