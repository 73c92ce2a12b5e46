"""Workers: processes that try seeds, replaced after some number of programs, since a process that has compiled hundreds has grown."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from benchmarks.fuzz.choices import drawn
from benchmarks.fuzz.fast import prepare
from benchmarks.fuzz.features import Choice
from benchmarks.fuzz.trial import Found, Result, Way, tried

CHUNK = 20
"""Seeds that one process takes at once."""
LIFE = 15
"""Chunks that a process takes before it is replaced."""
PATIENCE = 300
"""Seconds after which one program is a fault: nothing here takes more than some."""


def _late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"a program took more than {PATIENCE} s")


def seeded(programs: list[tuple[int, Choice]], way: Way, until: float) -> list[Result]:
    """Return the results of programs, by seed and choice, of those begun before ``until``."""
    signal.signal(signal.SIGALRM, _late)
    found = []
    for seed, choice in programs:
        if time.monotonic() > until:
            break
        signal.alarm(PATIENCE)
        try:
            found.append(tried(seed, choice, way))
        finally:
            signal.alarm(0)
    return found


def _started() -> None:
    # A worker whose run was stopped ends with it.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    prepare()


def results(seeds: range | list[range], jobs: int, until: float, way: Way | None = None) -> Iterator[list[Result]]:
    """Give the results of the seeds, chunk by chunk, of chunks begun before ``until`` (``time.monotonic``).

    Where a process dies, the chunks that were with it are tried again seed by seed, each in a process of its own; a program that kills
    that one is a FAULT.
    """
    way, ranges = way or Way(), [seeds] if isinstance(seeds, range) else seeds
    todo = deque(part[start : start + CHUNK] for part in ranges for start in range(0, len(part), CHUNK))
    alone: list[int] = []
    # Processes are replaced all at once: an executor that replaces them one by one (max_tasks_per_child) waits for ever when all have
    # reached their number. Nothing is cancelled: ``wait`` and ``as_completed`` are not told of futures that a shutdown cancels.
    while todo and time.monotonic() < until:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _started) as pool:
            pending: dict[Future[list[Result]], range] = {}
            left = jobs * LIFE
            while pending or (todo and left and time.monotonic() < until):
                try:
                    while todo and left and len(pending) < 2 * jobs and time.monotonic() < until:
                        begun = pool.submit(seeded, [(seed, drawn(seed)) for seed in todo[0]], way, until)
                        pending[begun] = todo.popleft()
                        left -= 1
                    done = next(iter(wait(pending, return_when=FIRST_COMPLETED).done))
                    found = done.result()
                    del pending[done]
                    yield found
                except BrokenProcessPool:
                    alone += [seed for chunk in pending.values() for seed in chunk]
                    break
    for seed in alone:
        if time.monotonic() > until:
            return
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _started) as pool:
            try:
                yield pool.submit(seeded, [(seed, drawn(seed))], way, until).result()
            except BrokenProcessPool:
                yield [Result(seed, drawn(seed), Found.FAULT, "its process died")]
