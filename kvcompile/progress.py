"""Progress of a long command on stderr: a live line on a terminal, plain lines in a pipe or a log.

    with ProgressLine("sensitivity", total=48) as progress:
        progress.at("model.layers.0 keys int4")
        progress.at("model.layers.0 values int4", done=1)
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

PERIOD = 5.0
"""Seconds between lines in a pipe: a busy machine may delay one, and users are promised one at least every ten."""


class ProgressLine:
    """The progress of a command, as a context manager: its current work, and how many steps are done.

    ``total``: number of steps, None if they are not counted. ``quiet``: show nothing. On a terminal the line disappears at the end; in a
    pipe a thread writes a line each ``period`` seconds, so work that is over before the first period writes nothing.
    """

    def __init__(
        self, name: str, total: int | None = None, *, quiet: bool = False, stream: TextIO | None = None, period: float = PERIOD
    ) -> None:
        self.name, self.total, self.quiet, self.period = name, total, quiet, period
        self.stream = sys.stderr if stream is None else stream
        self.doing, self.done = "", 0
        self._bar: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.quiet:
            return self
        if self.stream.isatty():
            self._bar = _bar(self.stream, self.total is not None)
            self._task = self._bar.add_task(self.name, total=self.total, doing="")
            self._bar.start()
            return self
        self._thread = threading.Thread(target=self._write_lines, name="kvcompile progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
        if self._thread is not None:
            self._thread.join()

    def at(self, doing: str, done: int | None = None) -> None:
        """Show ``doing``, the current work, and ``done``, the number of finished steps (None: unchanged)."""
        self.doing, self.done = doing, self.done if done is None else done
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, doing=doing)

    def line(self) -> str:
        """Return the line that a pipe shows now."""
        counted = f"{self.done} of {self.total}, " if self.total is not None else ""
        return f"{self.name}: {counted}{f'{self.doing}, ' if self.doing else ''}{time.monotonic() - self._started:.0f} s"

    def _write_lines(self) -> None:
        while not self._ended.wait(self.period):
            try:
                self.stream.write(self.line() + "\n")
                self.stream.flush()
            except (OSError, ValueError):
                # The reader closed the pipe; the work goes on.
                return


def _bar(stream: TextIO, counted: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text, doing = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[doing]}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), doing, TimeRemainingColumn()) if counted else (
        SpinnerColumn(), text, doing, TimeElapsedColumn(),
    )
    return Bar(*columns, console=Console(file=stream), transient=True)
