"""The progress of learning on stderr: step, loss, best validation, bits per value, time left."""

from __future__ import annotations

from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.progress import ProgressLine
from kvcompile.report import short_scheme


class Display(ProgressLine):
    """The progress of learning: steps done and figures; a context manager, silent if ``quiet``."""

    def __init__(self, steps: int, scheme: Beyond, quiet: bool) -> None:
        bits = scheme.bits + 2 * 8 * scheme.scale_dtype.itemsize / scheme.group
        super().__init__(f"{short_scheme(scheme)}, {bits:.2f} bits a value", steps, quiet=quiet)

    def step(self, step: int, loss: float, best: float | None) -> None:
        """Show one step's loss and the best validation so far, in nats per token; None before the first validation."""
        self.at(f"loss {loss:.4f}" + (f", best validation {best:.4f}" if best is not None else ""), done=step)
