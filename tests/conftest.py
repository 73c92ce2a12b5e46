"""What all tests share: skips with a reason, few threads, a clean Dynamo, ``--accept``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Inductor compiles in this process: workers that it starts import torch again, and the suite has one process a core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from torch._dynamo import guards

torch.set_num_threads(2)
# Tracing makes millions of objects that stay: looking through them at Python's default rate is 8% of the suite.
gc.set_threshold(200_000, 20, 50)
# A full collection after every graph, and a flushed cache to measure how long its guards take: as much again.
torch._dynamo.config.run_gc_after_compile = False
guards.profile_guard_manager = lambda *measured: 0.0

FIRST = ("certified", "triton", "prefill", "chunked", "cpp", "inductor")
"""Parts of the names of tests that compile kernels or interpret them: tens of seconds, so they do not come last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--accept`` writes what the golden tests see instead of comparing it."""
    parser.addoption("--accept", action="store_true", default=False, help="write the golden files instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long come first; those marked ``gpu`` are skipped, with the reason, where there is no device."""
    items.sort(key=lambda item: not any(part in item.nodeid for part in FIRST))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


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
    """No compiled code and no symbol left from another test, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
