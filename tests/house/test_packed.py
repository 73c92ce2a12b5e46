"""Packed files: what setup.py and MANIFEST.in name is there, and nothing that git tracks is missing from an sdist."""

from __future__ import annotations

import fnmatch
import runpy
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from kvcompile.tools.cli import shipped

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".ci/*", ".github/*", ".gitignore", ".pre-commit-config.yaml")
"""Tracked files for the repository alone."""


def patterns() -> list[tuple[str, str]]:
    """Return (folder, pattern) of each line of MANIFEST.in; the folder is "" for files at the top."""
    found = []
    for kind, *words in map(str.split, (ROOT / "MANIFEST.in").read_text().splitlines()):
        folder = words.pop(0) if kind == "recursive-include" else ""
        found += [(folder, word) for word in words]
    return found


def packed(name: str) -> bool:
    """Return whether an sdist holds a file."""
    path = Path(name)
    folder = path.parts[0] if len(path.parts) > 1 else ""
    own = name in {"MANIFEST.in", "pyproject.toml", "setup.py"}
    return own or any(folder == each and fnmatch.fnmatch(path.name, pattern) for each, pattern in patterns())


def test_an_sdist_has_every_tracked_file() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    names = listed.stdout.splitlines()
    missing = [name for name in names if not packed(name) and not any(fnmatch.fnmatch(name, each) for each in LEFT_OUT)]
    assert len(names) > 500 and not missing
    assert all(any(packed(name) and pattern == Path(name).name for name in names) for folder, pattern in patterns() if not folder)


def test_the_wheel_has_what_commands_read_of_the_examples() -> None:
    with mock.patch("setuptools.setup"):
        names = runpy.run_path(str(ROOT / "setup.py"))
    assert shipped.INSTALLED == ROOT / names["SHIPPED"] and shipped.examples() == ROOT / "examples"
    assert all((ROOT / "examples" / name).is_file() for name in names["EXAMPLES"])


def test_a_model_that_is_not_in_the_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(shipped.TargetError, match="clone of the repository"):
        shipped.require(tmp_path / "tinylm_16k")
    shipped.require(ROOT / "examples" / "tinylm_16k")
