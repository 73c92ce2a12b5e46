"""Run: send cases to worker processes side by side, and turn whatever happens to a process into a result.

Workers are forked from a server that has imported the libraries once. A worker runs many cases in a row; one that dies or
outlasts a case's time is replaced, and only the case that it was running is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import unittest.mock
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.outcomes import Outcome, Result

RETIRE = 12
"""Cases after which a worker is replaced: what compilers keep in memory goes with it."""


@dataclass
class _Worker:
    """A process and the case that it is running since ``started``."""

    process: Any
    pipe: Any
    case: str = ""
    started: float = 0.0
    done: int = 0

    def give(self, case: str, layers: int) -> None:
        """Start a case."""
        self.case, self.started = case, time.monotonic()
        self.pipe.send((case, layers))


@dataclass(frozen=True)
class Pool:
    """How many processes run, how long a case may take, until when cases are started, their models' layers, and where output goes."""

    jobs: int
    timeout: float
    deadline: float
    layers: int
    log: Path
    turns: Iterator[int] = field(default_factory=itertools.count)

    def results(self, cases: Sequence[str]) -> Iterator[Result]:
        """Return the result of each case as it is done; cases not started by the deadline are ``NOT_RUN``."""
        # Importing the libraries touches the driver, and a forked process cannot use a driver that its parent has touched.
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if not torch.cuda.is_available():
            context.set_forkserver_preload(["benchmarks.accept.worker"])
        waiting, running = deque(cases), list[_Worker]()
        try:
            while waiting or running:
                if waiting and time.monotonic() > self.deadline:
                    yield from (Result(case, Outcome.NOT_RUN, "the time of the run was over") for case in waiting)
                    waiting.clear()
                while waiting and len(running) < self.jobs:
                    running.append(self._worker(context))
                    running[-1].give(waiting.popleft(), self.layers)
                yield from self._step(running, waiting)
        finally:
            for worker in running:
                _end(worker)

    def _step(self, running: list[_Worker], waiting: deque[str]) -> Iterator[Result]:
        """Wait a little, and return the results of the cases that ended; workers go on with the next case, or end."""
        multiprocessing.connection.wait([worker.pipe for worker in running], timeout=1.0)
        for worker in list(running):
            result = self._collected(worker)
            if result is None:
                continue
            worker.done += 1
            over = not worker.process.is_alive() or worker.done >= RETIRE or result.outcome is Outcome.TIMEOUT
            if over or not waiting or time.monotonic() > self.deadline:
                running.remove(worker)
                _end(worker)
            else:
                worker.give(waiting.popleft(), self.layers)
            yield result

    def _collected(self, worker: _Worker) -> Result | None:
        """Return the result of a worker's case, one made for it where the process died or took too long, None while it runs."""
        taken = time.monotonic() - worker.started
        try:
            if worker.pipe.poll():
                return worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=10)
            return Result(worker.case, Outcome.CRASHED, _ended(worker.process.exitcode), seconds=round(taken, 1))
        if taken > self.timeout:
            worker.process.kill()
            worker.process.join()
            return Result(worker.case, Outcome.TIMEOUT, f"not done after {self.timeout:.0f} s", seconds=round(taken, 1))
        return None

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """Show the processes that are started inside the next GPU alone, in turns where there are several."""
        if torch.cuda.device_count() < 2:
            yield
            return
        shown = {"CUDA_VISIBLE_DEVICES": str(next(self.turns) % torch.cuda.device_count())}
        with unittest.mock.patch.dict(os.environ, shown):
            yield

    def _worker(self, context: Any) -> _Worker:
        from benchmarks.accept.worker import serve

        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, str(self.log)))
        with self._device():
            process.start()
        theirs.close()
        return _Worker(process, ours)


def _ended(status: int | None) -> str:
    """Return in words how a process ended."""
    if status is not None and status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def _end(worker: _Worker) -> None:
    """End a worker that has nothing to do, or that must not go on."""
    worker.pipe.close()
    worker.process.join(timeout=5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
