"""``kvcompile demo``: compiles tinylm three times (stock, dense, compressed), and shows texts, speed and bytes side by side."""

from __future__ import annotations

import argparse
import runpy

from kvcompile.tools.cli.shipped import examples


def run(arguments: argparse.Namespace) -> int:
    """Run the demo of the checkout, or the one in the installed package; return the exit status, 0."""
    given = [f"--{name}={getattr(arguments, name)}" for name in ("scheme", "prompt", "tokens", "threads")]
    runpy.run_path(str(examples() / "demo.py"))["main"](given)
    return 0
