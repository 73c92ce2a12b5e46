"""Runs a program in two processes of one group, as ``torchrun`` does."""

from __future__ import annotations

import os
import subprocess
import sys


def in_two_processes(*program: str, port: int) -> str:
    """Run a script, or ``-m`` and a module, with its arguments on one thread each; what both printed. ``port``: theirs alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), *program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
