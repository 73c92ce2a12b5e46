"""The command ``kvcompile``: parses its arguments, and only then imports the code that runs them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from kvcompile.errors import KvcompileError
from kvcompile.tools.cli.arguments import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 for success, 1 for refusals under --strict, 2 for errors."""
    arguments = parser().parse_args(argv)
    package = logging.getLogger("kvcompile")
    level = package.level
    if level == logging.NOTSET:
        # The report repeats the backend's warnings.
        package.setLevel(logging.ERROR)
    try:
        if getattr(arguments, "device", "") is None:
            arguments.device = _device()
        module, _, name = arguments.run.partition(":")
        return int(getattr(importlib.import_module(module), name)(arguments))
    except KvcompileError as error:
        from rich.console import Console

        Console(stderr=True).print(f"kvcompile: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); flushing the rest at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        package.setLevel(level)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
