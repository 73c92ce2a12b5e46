"""Run: send cases to worker processes side by side, and turn whatever happens to a process into a result.

Workers are forked from a server that has imported the libraries once. A worker runs many cases in a row; one that dies or
outlasts a case's time is replaced, and only the case that it was running is lost: its result says where each thread was. A case
that crashed is tried once more in a new process by stock torch.compile alone, which may fail or end that process too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import unittest.mock
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.accept.outcomes import Outcome, Result
from benchmarks.accept.ten_lines import TEN_LINES

RETIRE = 12
"""Cases after which a worker is replaced: what compilers keep in memory goes with it."""
GRACE = 2.0
"""Seconds after a case's time in which its worker prints the stacks of its threads."""
SHOWN = 1 << 15
"""Bytes of a dead process's output that its result keeps."""


@dataclass(frozen=True)
class Task:
    """A case that a worker runs over a model of ``layers`` layers; ``stock``: by stock torch.compile alone, nothing compared.

    ``until``: when its time is over, by the clock that ``time.monotonic`` reads in all processes.
    """

    case: str
    layers: int
    stock: bool = False
    until: float = math.inf


@dataclass
class _Worker:
    """A process, the file that its output goes to, and the task that it is running since ``started``."""

    process: Any
    pipe: Any
    log: Path
    task: Task | None = None
    started: float = 0.0
    done: int = 0
    said: int = 0

    def give(self, task: Task, seconds: float) -> None:
        """Start a task that may take some seconds."""
        self.task, self.started, self.said = task, time.monotonic(), self._size()
        self.pipe.send(replace(task, until=self.started + seconds))

    def output(self) -> str:
        """Return the end of what was printed since the task began: where a process dies, faulthandler's stacks."""
        if not self._size():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self.said, self._size() - SHOWN))
            return file.read().decode(errors="replace")

    def _size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@dataclass(frozen=True)
class Pool:
    """How many processes run, how long a case may take, until when cases are started, their models' layers, and where output goes.

    ``log`` is the name that each process's file begins with. ``died``: results of cases that crashed, by identifier, until stock
    torch.compile has been tried.
    """

    jobs: int
    timeout: float
    deadline: float
    layers: int
    log: Path
    turns: Iterator[int] = field(default_factory=itertools.count)
    died: dict[str, Result] = field(default_factory=dict)

    def results(self, cases: Sequence[str]) -> Iterator[Result]:
        """Return the result of each case as it is done; cases not started by the deadline are ``NOT_RUN``."""
        # Importing the libraries touches the driver, and a forked process cannot use a driver that its parent has touched.
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if not torch.cuda.is_available():
            context.set_forkserver_preload(["benchmarks.accept.worker"])
        waiting, running = deque(Task(case, self.layers) for case in cases), list[_Worker]()
        try:
            while waiting or running:
                if waiting and time.monotonic() > self.deadline:
                    late = "the time of the run was over"
                    yield from (self.died.get(task.case, Result(task.case, Outcome.NOT_RUN, late)) for task in waiting)
                    waiting.clear()
                while waiting and len(running) < self.jobs:
                    running.append(self._worker(context))
                    running[-1].give(waiting.popleft(), self.timeout)
                yield from self._step(running, waiting)
        finally:
            for worker in running:
                _end(worker)

    def _step(self, running: list[_Worker], waiting: deque[Task]) -> Iterator[Result]:
        """Wait a little, and return the results of the cases that ended; workers go on with the next case, or end."""
        multiprocessing.connection.wait([worker.pipe for worker in running], timeout=1.0)
        for worker in list(running):
            result = self._collected(worker)
            if result is None or worker.task is None:
                continue
            worker.done += 1
            task, alive = worker.task, worker.process.is_alive()
            if task.stock:
                result = blamed(self.died.pop(task.case), result)
            elif result.outcome is Outcome.CRASHED and task.case not in TEN_LINES:
                self.died[task.case] = result
                waiting.appendleft(replace(task, stock=True))
            fit = alive and result.outcome is not Outcome.CRASHED and not task.stock
            # Stock is asked in a process that has run nothing else.
            if not fit or worker.done >= RETIRE or not waiting or waiting[0].stock or time.monotonic() > self.deadline:
                running.remove(worker)
                _end(worker)
            else:
                worker.give(waiting.popleft(), self.timeout)
            if task.case not in self.died:
                yield result

    def _collected(self, worker: _Worker) -> Result | None:
        """Return the result of a worker's case, one made for it where the process died or took too long, None while it runs."""
        taken, case = time.monotonic() - worker.started, worker.task.case if worker.task else ""
        try:
            if worker.pipe.poll():
                return worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=10)
            # A process that prints the stacks of threads which go on may be ended by that: it was late all the same.
            late = taken > self.timeout - 1
            outcome, detail = (Outcome.TIMEOUT, self._late) if late else (Outcome.CRASHED, _ended(worker.process.exitcode))
            return Result(case, outcome, detail, seconds=round(taken, 1), trace=worker.output())
        if taken > self.timeout + GRACE:
            worker.process.kill()
            worker.process.join()
            return Result(case, Outcome.TIMEOUT, self._late, seconds=round(taken, 1), trace=worker.output())
        return None

    @property
    def _late(self) -> str:
        return f"not done after {self.timeout:.0f} s"

    @contextlib.contextmanager
    def _device(self, number: int) -> Iterator[None]:
        """Show the processes that are started inside one GPU alone, in turns where there are several."""
        if torch.cuda.device_count() < 2:
            yield
            return
        shown = {"CUDA_VISIBLE_DEVICES": str(number % torch.cuda.device_count())}
        with unittest.mock.patch.dict(os.environ, shown):
            yield

    def _worker(self, context: Any) -> _Worker:
        from benchmarks.accept.worker import serve

        ours, theirs = context.Pipe()
        number = next(self.turns)
        log = self.log.with_name(f"{self.log.name}.{number}")
        log.unlink(missing_ok=True)
        process = context.Process(target=serve, args=(theirs, str(log)))
        with self._device(number):
            process.start()
        theirs.close()
        return _Worker(process, ours, log)


def blamed(crash: Result, stock: Result) -> Result:
    """Return the result of a case that crashed: outside where stock torch.compile alone fails too."""
    if stock.outcome not in {Outcome.CRASHED, Outcome.OUTSIDE}:
        return crash
    return replace(crash, outcome=Outcome.OUTSIDE, detail=f"stock torch.compile alone: {stock.detail}; this backend: {crash.detail}")


@contextlib.contextmanager
def stacks_at(until: float, stream: TextIO) -> Iterator[None]:
    """Print the stacks of all threads to ``stream`` if what runs inside is not done at that time.

    By a thread that needs neither the interpreter nor a signal: processes on rented machines may have signals blocked.
    """
    if math.isfinite(until):
        faulthandler.dump_traceback_later(max(0.01, until - time.monotonic()), file=stream)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


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
