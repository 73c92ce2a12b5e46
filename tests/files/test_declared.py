"""Declared values: plain data fits its type or is refused with its place, whatever it is."""

from __future__ import annotations

import contextlib
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.errors import FileUnfit
from kvcompile.files.declared import AtLeast, Range, as_declared
from kvcompile.files.json_file import parsed, read_json


class Letter(enum.Enum):
    """Two members with values of one type."""

    A = "a"
    B = "b"


@dataclass(frozen=True)
class Inner:
    """A record with a range and a default."""

    count: Annotated[int, Range(0, 10)]
    share: Annotated[float, Range(0.0, 1.0)] = 0.5


@dataclass(frozen=True)
class Outer:
    """A record with every kind of field."""

    name: str
    inner: Inner
    letter: Letter
    dtype: torch.dtype
    pairs: tuple[tuple[int, float], ...]
    rows: Annotated[list[str], AtLeast(1)]
    maybe: int | None = None
    more: dict[str, Inner] = field(default_factory=dict)


GOOD: dict[str, Any] = {
    "name": "x", "inner": {"count": 3}, "letter": "b", "dtype": "float16", "pairs": [[1, 2.5], [2, 3]], "rows": ["r"],
    "more": {"a": {"count": 0}},
}


def test_what_fits_is_read() -> None:
    expected = Outer("x", Inner(3), Letter.B, torch.float16, ((1, 2.5), (2, 3.0)), ["r"], None, {"a": Inner(0)})
    assert as_declared(Outer, GOOD) == expected
    assert parsed(json.dumps(GOOD), Outer) == expected


@pytest.mark.parametrize(("change", "place"), [
    ({"name": 1}, "file.name"), ({"name": None}, "file.name"), ({"inner": []}, "file.inner"), ({"inner": {}}, "the field count"),
    ({"inner": {"count": True}}, "inner.count"), ({"inner": {"count": 11}}, "from 0 to 10 in the file.inner.count"),
    ({"inner": {"count": 1.0}}, "inner.count"), ({"inner": {"count": 1, "share": float("nan")}}, "inner.share"),
    ({"inner": {"count": 1, "share": 10**400}}, "inner.share"), ({"letter": "c"}, "'a' or 'b'"), ({"letter": ["a"]}, "file.letter"),
    ({"dtype": "float17"}, "dtype"), ({"dtype": "load"}, "dtype"), ({"dtype": 1}, "dtype"), ({"pairs": [[1, 2, 3]]}, r"pairs\[0\]"),
    ({"pairs": [[1, "2"]]}, r"pairs\[0\]\[1\]"), ({"pairs": {"0": [1, 2]}}, "pairs"), ({"rows": []}, "at least 1 items"),
    ({"maybe": "no"}, "int"), ({"more": {"a": {"count": -1}}}, "more.a.count"), ({"other": 1}, "found 'other'"),
])
def test_what_does_not_fit_is_refused_with_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(FileUnfit, match=place):
        as_declared(Outer, {**GOOD, **change})


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4)
                    | st.dictionaries(st.sampled_from([*GOOD, "count", "a"]), inner, max_size=4), max_leaves=12)


@given(JSON)
def test_nothing_else_is_ever_raised(value: Any) -> None:
    for given_value in (value, {**GOOD, "inner": value}, {**GOOD, **value} if isinstance(value, dict) else value):
        with contextlib.suppress(FileUnfit):
            as_declared(Outer, given_value)


@pytest.mark.parametrize("text", [
    "", "{", "[" * 100_000, '{"a":' * 50_000, "9" * 5000, '{"name": 1, "name": 2}', b"\xff\xfe\x00", "[1,]", "nul", "\x00",
])
def test_text_that_is_no_json_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileUnfit, match=r"JSON in x\.json"):
        read_json(path)


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(FileUnfit, match="expected a file in"):
            read_json(path)
