"""Documents name files that exist: the walk through the architecture, each once, and the contributors' guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvcompile"


def places(text: str) -> list[str]:
    """Files and folders that stand in backquotes, braces taken apart."""
    made = []
    for item in re.findall(r"`((?:[\w.]+/)+[\w.{},*]*|\w+\.py)`", text):
        inner = re.search(r"{(.*)}", item)
        made += [item] if inner is None else [item.replace(inner[0], part) for part in inner[1].split(",")]
    return made


def exists(place: str) -> bool:
    if "/" not in place:
        return next(PACKAGE.rglob(place), None) is not None
    return any(next(folder.glob(place), None) is not None for folder in (ROOT, PACKAGE))


@pytest.mark.parametrize("name", ["docs/ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(name: str) -> None:
    named = places((ROOT / name).read_text())
    missing = [place for place in named if not exists(place)]
    assert len(named) > 10 and not missing


def test_a_site_meets_no_file_twice() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `([\w/.]+)` \|", text, re.MULTILINE)
    assert len(rows) > 30 and len(rows) == len(set(rows))
    assert len(text.splitlines()) <= 120
