"""Runs: one mutant in a copy of the tree, and the tests that may notice it."""

from __future__ import annotations

import enum
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.listed import ROOT, Mutant

COPIED = (
    "kvcompile", "tests", "examples", "benchmarks", "docs", "conftest.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


class Outcome(enum.Enum):
    """The end of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMEOUT = "not done in time"
    ABSENT = "its line is not in the source"
    UNTRIED = "pytest itself failed"


@dataclass(frozen=True)
class Ended:
    """A mutant's outcome; ``killer``: the first test that failed."""

    mutant: Mutant
    outcome: Outcome
    killer: str = ""


@contextmanager
def tree(mutant: Mutant) -> Iterator[Path]:
    """Give a copy of the tree with a mutant in it; raises ValueError where its line is not there."""
    changed = mutant.applied((ROOT / mutant.file).read_text())
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy = Path(folder) / "tree"
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.npz", "*.safetensors"), symlinks=True)
            else:
                copy.mkdir(exist_ok=True)
                shutil.copy(source, copy / name)
        (copy / mutant.file).write_text(changed)
        yield copy


def ended(mutant: Mutant, tests: Sequence[str], seconds: float) -> Ended:
    """Run tests over a mutant until one fails; one that hangs is noticed as well, by whoever waits."""
    try:
        with tree(mutant) as copy:
            path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {
                **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(copy.parent / "inductor"),
                "TRITON_CACHE_DIR": str(copy.parent / "triton"), "HOME": str(copy.parent),
            }
            command = [
                sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu and not slow",
                *dict.fromkeys(tests),
            ]
            try:
                done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                return Ended(mutant, Outcome.TIMEOUT)
    except ValueError:
        return Ended(mutant, Outcome.ABSENT)
    if done.returncode == 0:
        return Ended(mutant, Outcome.SURVIVED)
    found = FAILED.search(done.stdout)
    # Without the name of a test nothing says that a test noticed the change: pytest may have failed over its own configuration.
    if done.returncode != 1 or found is None:
        return Ended(mutant, Outcome.UNTRIED, f"pytest ended with {done.returncode}")
    return Ended(mutant, Outcome.KILLED, found[1])
