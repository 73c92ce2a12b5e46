"""Seen: which functions of the package each test runs, so that a mutant meets the tests that may notice it and no others.

A plugin for pytest, on Python 3.12 and later: ``sys.monitoring`` tells of a function's first start in each test, and of nothing else.

```
SEEN=/tmp/seen python -m pytest -n 16 -m "not slow and not gpu" -p benchmarks.mutants.seen
python -m benchmarks.mutants --draw 38 --jobs 16 --seen /tmp/seen
```
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from benchmarks.mutants.listed import ROOT, Mutant

PACKAGE = str(ROOT / "kvcompile") + os.sep
FOLDER = "SEEN"
"""The environment variable that names the folder of what was seen; each process of pytest writes a file of its own there."""
MOST = 150
"""Tests that a mutant meets: what so many tests of all files do not notice, the others seldom do."""


def place(file: str, scope: str) -> str:
    """Return what a function of a file is called in what was seen: nested ones count as the one around them."""
    return f"{file}:{scope.split('.<locals>', maxsplit=1)[0]}"


class Watch:
    """Adds the functions that start to those of the test that runs."""

    def __init__(self) -> None:
        self.started: set[str] = set()
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self.monitoring = monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "kvcompile mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, self._start)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)

    def _start(self, code: CodeType, offset: int) -> Any:
        if code.co_filename.startswith(PACKAGE):
            self.started.add(place(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        return self.monitoring.DISABLE

    def again(self) -> None:
        """Begin a test: every function is told of once more."""
        self.started = set()
        self.monitoring.restart_events()


def pytest_configure(config: pytest.Config) -> None:
    """Watch each process that runs tests."""
    if FOLDER in os.environ and sys.version_info >= (3, 12) and not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])), "kvcompile-seen")


class Recorder:
    """Writes a line for each test that passes: its identifier, the seconds it took, the functions that it ran.

    One that fails over the source as it is would fail over every mutant.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w")
        self.watch = Watch()
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a test fails, or what it sets up."""
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run one test and write down what it ran."""
        self.watch.again()
        self.failed = False
        began = time.perf_counter()
        result = yield
        if self.failed:
            return result
        line = {"test": item.nodeid, "seconds": time.perf_counter() - began, "ran": sorted(self.watch.started)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        return result


def read(folder: Path) -> dict[str, list[str]]:
    """Return the tests that run each function: the quickest of every file, then the next ones of every file.

    Tests of one file look at one thing: hundreds of quick ones of two files noticed less than the quickest of thirty files.
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for function in row["ran"]:
                found.setdefault(function, {}).setdefault(row["test"].partition("::")[0], []).append((row["seconds"], row["test"]))
    return {
        function: [test for _, _, test in sorted((at, *item) for tests in files.values() for at, item in enumerate(sorted(tests)))]
        for function, files in found.items()
    }


def tests_of(mutant: Mutant, seen: dict[str, list[str]], others: Iterable[str]) -> tuple[str, ...]:
    """Return tests that run a mutant's function, as ``read`` orders them; ``others`` where its file is a template or no test runs it."""
    tests = seen.get(place(mutant.file, mutant.scope), []) if mutant.scope else []
    return tuple(tests[:MOST]) or tuple(others)
