"""The command ``kvcompile``: parses its arguments, and only then imports the code that runs them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvcompile.errors import KvcompileError
from kvcompile.progress import ProgressLine
from kvcompile.tools.cli.arguments import parser
from kvcompile.tools.cli.interrupt import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0 for success, 1 for refusals under --strict, 2 for errors, 130 for Ctrl-C; a command keeps its results so far.
    """
    arguments = parser().parse_args(argv)
    package = logging.getLogger("kvcompile")
    level = package.level
    if level == logging.NOTSET:
        # The report repeats the backend's warnings.
        package.setLevel(logging.ERROR)
    try:
        return int(_loaded(arguments)(arguments))
    except KvcompileError as error:
        from rich.console import Console

        Console(stderr=True).print(f"kvcompile: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("kvcompile: stopped\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); flushing the rest at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        package.setLevel(level)


def _loaded(arguments: Any) -> Callable[[Any], int]:
    """Return the function that runs a command. Torch is imported here, and the device chosen if the command has one."""
    module, _, name = arguments.run.partition(":")
    with ProgressLine("kvcompile: loading torch"):
        if getattr(arguments, "device", "") is None:
            arguments.device = _device()
        found: Callable[[Any], int] = getattr(importlib.import_module(module), name)
        return found


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
