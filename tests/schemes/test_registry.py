"""The registry: schemes by name, imported when they are asked for; those of other packages by entry points."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcompile import schemes
from kvcompile.errors import BadScheme, UnknownScheme
from kvcompile.schemes import registry
from kvcompile.schemes.registry import BY_NAME, PLACES

SOURCE = """
import dataclasses
from typing import ClassVar
from kvcompile.schemes import Int8

@dataclasses.dataclass(frozen=True)
class Theirs(Int8):
    name: ClassVar[str] = "theirs"

broken = 1
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Entry points of a package that is installed, by name; a test fills them before it asks."""
    module: Any = types.ModuleType("their_package")
    monkeypatch.setitem(sys.modules, "their_package", module)
    exec(SOURCE, vars(module))
    points: dict[str, str] = {}

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "kvcompile.schemes"
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in points.items()]

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(BY_NAME, "found", {name: scheme for name, scheme in BY_NAME.found.items() if name in PLACES})
    registry._entry_points.cache_clear()
    yield points
    registry._entry_points.cache_clear()
    schemes.parse.cache_clear()


@pytest.mark.parametrize("name", PLACES)
def test_a_scheme_is_where_its_line_says(name: str) -> None:
    found = BY_NAME[name]
    assert found.name == name and f"{found.__module__}:{found.__qualname__}" == PLACES[name]
    assert getattr(schemes, found.__name__) is found


def test_names_are_listed_and_one_is_parsed_without_an_import_of_others() -> None:
    text = """
import sys
from kvcompile import schemes

def extensions():
    return {name.split(".")[2] for name in sys.modules if name.startswith("kvcompile.extensions.")}

print(list(schemes.BY_NAME), "squat" in schemes.BY_NAME, schemes.parse("int4(group=64)"))
assert not extensions()
schemes.parse("squat-paper")
print(extensions())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[1:] == ["{'squat'}"] and str(list(PLACES)) in done.stdout, done.stderr


def test_an_entry_point_is_a_scheme(installed: dict[str, str]) -> None:
    installed["theirs"] = "their_package:Theirs"
    assert schemes.parse("theirs(scale_dtype=float32)").spec().startswith("theirs")
    assert schemes.registered()[-1].name == "theirs" and "theirs" in BY_NAME and "theirs" not in PLACES


def test_an_entry_point_that_cannot_be_imported_is_told_and_the_others_are_there(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed |= {"gone": "no_such_package:Scheme", "broken": "their_package:broken", "other": "their_package:Theirs", "int8": "no:Scheme"}
    assert [scheme.name for scheme in schemes.registered()] == list(PLACES)
    assert all(name in caplog.text for name in ("no_such_package", "found 1", "'theirs', found 'other'", "'no:Scheme'"))
    with pytest.raises(BadScheme, match=r"entry point 'gone' .* to import, found no_such_package:Scheme: ModuleNotFoundError"):
        schemes.parse("gone")
    with pytest.raises(UnknownScheme):
        schemes.parse("theirs")
