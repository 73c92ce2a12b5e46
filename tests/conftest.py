"""What all tests share: skips with a reason, few threads, a clean Dynamo, ``--accept``."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Inductor compiles in this process: workers that it starts import torch again, and the suite has one process a core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A second thread that has nothing to do sleeps: it spins by default, on the core of the suite's other process. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import joined_kernels
import pytest
import sympy
import torch
import torch._inductor.config
from torch._dynamo import guards
from torch._inductor import sizevars
from torch._inductor import utils as inductor_utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._subclasses.fake_tensor import FakeTensorMode

torch.set_num_threads(2)
# Tracing makes millions of objects that stay: looking through them at Python's default rate is 8% of the suite.
gc.set_threshold(200_000, 20, 50)
# A full collection after every graph, and a flushed cache to measure how long its guards take: as much again.
torch._dynamo.config.run_gc_after_compile = False
guards.profile_guard_manager = lambda *measured: 0.0
# A message with two stacks for every attribute that traced code sets, for a log that nobody reads: 2% of a test that compiles.
if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
    torch._dynamo.config.side_effect_replay_policy = "silent"
# A module's own attribute is found at once, a setting's value is looked for by a function: this one is asked for before every instruction.
vars(torch._dynamo.config)["verbose"] = torch._dynamo.config.verbose
# Inductor simplifies an index expression for every stride it asks for: a third of its own time for a graph of squat. Expanding is equal,
# gave the same expression for all of the 735 strides of that graph, and takes a tenth of the time.
sizevars.sympy = SimpleNamespace(**{**vars(sympy), "simplify": sympy.expand})
# Line tables of generated C++, for stacks that nobody reads: 40% of the compiler's time.
if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
    torch._inductor.config.aot_inductor.enable_line_tables = False
# Pytest listens to loggers that do not propagate, so that torch prints every graph of every stage for its trace log.
_TRACE = logging.getLogger("torch.__trace")
_TRACE.addHandler = lambda handler: None  # type: ignore[method-assign]
_TRACE.handlers.clear()


def _fill_once_a_set_of_rules(fill: Callable[[object], None]) -> Callable[[object], None]:
    """Return ``fill``, an ``__init__`` of Inductor's only table of result dtypes, such that it runs again only where rules were added.

    Inductor calls it for every operation that it generates code for: 1.5 s for the graphs of one layer of kivi on a CPU, of about 23.
    """
    known = 0

    def init(self: object) -> None:
        nonlocal known
        if known != len(inductor_utils.op_dtype_propagation_rules):
            fill(self)
            known = len(inductor_utils.op_dtype_propagation_rules)

    return init


DtypePropagationOpsHandler.__init__ = _fill_once_a_set_of_rules(DtypePropagationOpsHandler.__init__)  # type: ignore[method-assign]
joined_kernels.install()


def _symbolic(value: object) -> bool:
    """Whether an argument of an operator has a size that is a symbol."""
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides
    if isinstance(value, list | tuple):
        return any(map(_symbolic, value))
    return isinstance(value, torch.SymInt)


def _without_symbols(cached: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``cached``, fake tensors' dispatch through torch's cache of results, such that sizes that are symbols go past the cache.

    Symbols are those of one trace, so that most such entries are made and never read, and to read one takes as long as to compute it: 15%
    of a test that compiles. ``TORCH_FAKE_TENSOR_DISPATCH_CACHE=0`` is torch's switch for the whole of it.
    """

    def dispatch(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.shape_env is not None and any(map(_symbolic, args)):
            return self._dispatch_impl(func, types, args, kwargs)
        return cached(self, func, types, args, kwargs)

    return dispatch


FakeTensorMode._cached_dispatch_impl = _without_symbols(FakeTensorMode._cached_dispatch_impl)  # type: ignore[method-assign]


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--accept`` writes what the golden tests see instead of comparing it."""
    parser.addoption("--accept", action="store_true", default=False, help="write the golden files instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long come first; ``SLOW`` ones are marked so; without a device those marked ``gpu`` are skipped, with the reason."""
    items.sort(key=lambda item: not any(part in item.nodeid for part in FIRST))
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
        patched.setattr("kvcompile.lowering.remembered.Remembered.__contains__", lambda self, key: False)
        yield


@pytest.fixture(autouse=True)
def said_anew() -> None:
    """Clear the warnings that a process gives once, so that every test sees its own."""
    handle = sys.modules.get("kvcompile.runtime.handle")
    if handle is not None:
        handle.tell.cache_clear()
        handle._say.cache_clear()


@pytest.fixture(autouse=True)
def every_rewrite_is_validated(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A site that is rewritten without having been tried fails its test, unless the test is marked ``unvalidated``."""
    yield
    said = [record.getMessage() for record in caplog.get_records("call") if "could not validate" in record.msg]
    assert not said or request.node.get_closest_marker("unvalidated"), said[0]
