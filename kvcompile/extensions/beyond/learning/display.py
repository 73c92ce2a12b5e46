"""The progress of learning on a terminal: step, loss, best validation, bits per value, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.report import short_scheme


class Display:
    """Progress bar of learning on stderr: steps done, figures and time left; a context manager, silent if ``quiet``."""

    def __init__(self, steps: int, scheme: Beyond, quiet: bool) -> None:
        bits = scheme.bits + 2 * 8 * scheme.scale_dtype.itemsize / scheme.group
        self.bar = Progress(
            TextColumn(f"{short_scheme(scheme)}, {bits:.2f} bits a value"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(), console=Console(stderr=True), disable=quiet,
        )
        self.task = self.bar.add_task("learn", total=steps, figures="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, step: int, loss: float, best: float | None) -> None:
        """Show one step's loss and the best validation so far, in nats per token; None before the first validation."""
        figures = f"loss {loss:.4f}" + (f", best validation {best:.4f}" if best is not None else "")
        self.bar.update(self.task, completed=step, figures=figures)
