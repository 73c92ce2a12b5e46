"""House rule on names: a class name stands for one class of the package, private ones included."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """The files that define each class at the top level of a module, by the class's name; ``sources``: texts by file."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path}:{node.lineno}")
    return found


def duplicates(sources: dict[str, str]) -> list[str]:
    """A line for each class name that is defined more than once, with its files."""
    return [f"{name}: {', '.join(places)}" for name, places in sorted(classes(sources).items()) if len(places) > 1]


def test_no_class_name_is_defined_twice() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "kvcompile").rglob("*.py"))}
    assert {"Slot", "SlotPlan", "Scheme"} <= set(classes(sources)), "the package's classes were not found"
    found = duplicates(sources)
    assert not found, "classes that share a name; say whose or what each is:\n" + "\n".join(found)


def test_a_second_class_of_a_name_is_listed_with_both_files() -> None:
    sources = {"a.py": "class Plan: ...\n\nclass Part: ...\n", "b.py": "import enum\n\nclass Plan(enum.Enum): ...\n", "c.py": "Part = 1\n"}
    assert duplicates(sources) == ["Plan: a.py:1, b.py:3"]
