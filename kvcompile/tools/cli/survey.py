"""Survey: tries many architectures, each in its own process, so that a crash or a hang in one does not stop the others.

Processes are forked from a server that has imported the libraries once. A process sends each case when it is done; one that crashes or
exceeds its time loses only the cases that it had not sent.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcompile.files.json_file import read_json
from kvcompile.tools.cli.interrupt import ignore_interrupts
from kvcompile.tools.cli.trial import Case, CaseOutcome, TrialSettings, cases


@dataclass(frozen=True)
class Survey:
    """The cases to try: architectures by name, kinds of cache, attention implementations; and how each case is run.

    ``timeout``: seconds.
    """

    architectures: tuple[str, ...]
    caches: tuple[str, ...]
    attentions: tuple[str, ...]
    settings: TrialSettings = field(default_factory=TrialSettings)
    timeout: float = 600.0
    jobs: int = 1


@dataclass
class _Job:
    """One architecture's process and the cases that it has sent so far."""

    name: str
    process: Any
    pipe: Any
    started: float
    done: list[Case] = field(default_factory=list)


def read_cases(path: Path) -> list[Case]:
    """Return the cases that an earlier survey wrote as JSON. Raises FileUnfit if the file is not one."""
    found: list[Case] = read_json(path, list[Case])
    return found


def untried(
    architectures: Sequence[str], caches: Sequence[str], attentions: Sequence[str], done: Sequence[Case]
) -> tuple[str, ...]:
    """Return the architectures with at least one case that is not in ``done``."""
    tried = {(case.architecture, case.cache, case.attention) for case in done}
    return tuple(
        name for name in architectures if any((name, cache, attention) not in tried for cache in caches for attention in attentions)
    )


def _work(pipe: Any, name: str, caches: Sequence[str], attentions: Sequence[str], settings: TrialSettings) -> None:
    """Run all cases of one architecture and send each through ``pipe``; the body of its process."""
    import torch

    ignore_interrupts()
    torch.set_num_threads(1)
    # The cases already contain the backend's and Dynamo's warnings.
    logging.getLogger("kvcompile").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    for case in cases(name, caches, attentions, settings):
        pipe.send(case)
    pipe.close()


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcompile.tools.cli.warm"])
    return context


def conduct(survey: Survey, started: Callable[[str], None] = lambda name: None) -> Iterator[list[Case]]:
    """Yield the cases of each architecture when it is done; ``started`` is called with its name before.

    Processes that still run when the caller stops are ended.
    """
    context, waiting, running = _context(), deque(survey.architectures), list[_Job]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, survey.jobs):
                name = waiting.popleft()
                started(name)
                running.append(_start(context, name, survey))
            multiprocessing.connection.wait([job.pipe for job in running], timeout=1.0)
            for job in list(running):
                finished = _collect(job)
                if finished or time.monotonic() - job.started > survey.timeout:
                    running.remove(job)
                    yield _closed(job, survey, finished)
    finally:
        for job in running:
            job.process.kill()


def _start(context: Any, name: str, survey: Survey) -> _Job:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, name, survey.caches, survey.attentions, survey.settings), daemon=True)
    process.start()
    theirs.close()
    return _Job(name, process, ours, time.monotonic())


def _collect(job: _Job) -> bool:
    """Receive the cases that the process has sent; return whether it is done."""
    try:
        while job.pipe.poll():
            job.done.append(job.pipe.recv())
    except EOFError:
        return True
    return False


def _closed(job: _Job, survey: Survey, finished: bool) -> list[Case]:
    """End a job's process and return its cases, with a failed case for each that it did not send."""
    job.process.join(timeout=10.0 if finished else 0.0)
    if job.process.is_alive():
        job.process.kill()
        job.process.join()
    sent = {(case.cache, case.attention) for case in job.done}
    why = f"its process ended with status {job.process.exitcode}" if finished else f"not done after {survey.timeout:.0f} s"
    missing = [
        Case(job.name, cache, attention, CaseOutcome.FAILED.value, why)
        for attention in survey.attentions for cache in survey.caches if (cache, attention) not in sent
    ]
    return [*job.done, *missing]
