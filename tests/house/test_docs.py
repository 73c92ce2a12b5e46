"""Documents name files that exist: the architecture, each once, the contributors' guide, the glossary; README is short."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("name", ["docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(name: str) -> None:
    named = places((ROOT / name).read_text())
    missing = [place for place in named if not exists(place)]
    assert len(named) > 10 and not missing


def test_a_site_meets_no_file_twice() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `([\w/.]+)` \|", text, re.MULTILINE)
    assert len(rows) > 30 and len(rows) == len(set(rows))
    assert len(text.splitlines()) <= 120


def defined(module: Path) -> set[str]:
    """Return the names that a module defines at its top level; none if there is no such module."""
    names = set[str]()
    if not module.is_file():
        return names
    for node in ast.parse(module.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target if isinstance(node, ast.AnnAssign) else node]
        names |= {getattr(target, "name", getattr(target, "id", "")) for target in targets}
    return names


def test_the_guide_names_what_its_files_define() -> None:
    """``file.py``, ``NAME``, and ``NAME`` of or in ``file.py``, each in backquotes."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    named = [(place, name) for place, names in re.findall(r"`([\w/]+\.py)`((?:, `\w+`)+)", text) for name in re.findall(r"\w+", names)]
    named += [(place, name) for name, place in re.findall(r"`(\w+)` (?:of|in) `([\w/]+/\w+\.py)`", text)]
    missing = [(place, name) for place, name in named if not any(name in defined(folder / place) for folder in (ROOT, PACKAGE))]
    assert len(named) > 12 and not missing


def test_the_glossary_says_where_each_word_is_defined() -> None:
    text = (ROOT / "docs/GLOSSARY.md").read_text()
    rows = re.findall(r"^\| \*\*([\w ]+)\*\* \| ([^|]+)\. \| `([\w/.]+)`: `(\w+)` \|$", text, re.MULTILINE)
    words = [word for word, _, _, _ in rows]
    assert len(rows) == text.count("| **") and words == sorted(set(words)) and 25 <= len(words) <= 50
    assert not [word for word, meaning, _, _ in rows if ". " in meaning]
    missing = [f"{word}: {module} {name}" for word, _, module, name in rows if name not in defined(PACKAGE / module)]
    assert not missing


def test_guides_link_the_glossary() -> None:
    assert "GLOSSARY.md" in (ROOT / "docs/ARCHITECTURE.md").read_text() and "docs/GLOSSARY.md" in (ROOT / "CONTRIBUTING.md").read_text()


def test_readme_is_short() -> None:
    """For a person with a model and a memory bill; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 1800


def test_links_lead_somewhere() -> None:
    """Links of all pages to files of the repository."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("examples/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())]
    assert len(links) > 100 and not [(page, link) for page, link in links if not (page.parent / link).exists()]
