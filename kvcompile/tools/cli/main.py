"""The command ``kvcompile``: reads its arguments, and imports what runs them when they are right."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from kvcompile.errors import KvcompileError
from kvcompile.tools.cli.arguments import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for refusals under --strict, 2 for errors."""
    arguments = parser().parse_args(argv)
    package = logging.getLogger("kvcompile")
    level = package.level
    if level == logging.NOTSET:
        # What the backend warns of stands in the report.
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
        # The reader has seen enough (`| head`); what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        package.setLevel(level)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
