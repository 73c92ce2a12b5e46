"""The table of a public checkpoint: pairs of the same documents, one filter, and what was not run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks import public

DENSE = {"a/acc": {"0": 1.0, "1": 0.0, "2": 1.0}}


def test_scores_are_of_the_first_filter_and_leave_other_lengths_out() -> None:
    samples = {
        "gsm8k": [
            {"doc_id": 0, "filter": "strict", "metrics": ["exact_match"], "exact_match": 1.0},
            {"doc_id": 0, "filter": "flexible", "metrics": ["exact_match"], "exact_match": 0.0},
        ],
        "niah": [{"doc_id": 0, "metrics": ["4096", "8192"], "4096": 0.5, "8192": -1.0}],
    }
    assert public.scores_of(samples) == {"gsm8k/exact_match": {"0": 1.0}, "niah/4096": {"0": 0.5}}


def test_differences_are_over_documents_that_both_have() -> None:
    found = public.cell({"a/acc": {"1": 1.0, "2": 1.0, "9": 0.0}}, DENSE, "a/acc")
    assert found is not None
    assert found.mean.value == pytest.approx(2 / 3)
    assert found.difference is not None
    assert found.difference.value == pytest.approx(0.5)
    assert public.cell(DENSE, DENSE, "a/acc").difference is None  # type: ignore[union-attr]
    assert public.cell(None, DENSE, "a/acc") is None


def test_a_cell_without_a_run_says_so() -> None:
    rows = public.table({"dense": DENSE}, ["dense", "int4"], ["ruler"])
    assert rows == [["task", "dense", "int4"], ["a/acc", "0.667", "not run"], ["ruler", "not run", "not run"]]


def test_what_is_measured_is_read_and_a_refused_scheme_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(options: object, scheme: str) -> dict[str, object]:
        asked.append(scheme)
        if scheme == "kivi":
            raise ValueError("heads of 60 channels")
        return {"scores": DENSE, "tasks": ["a"]}

    monkeypatch.setattr(public, "measure", measure)
    given = ["model", "--schemes", "kivi;int4(window=32)", "--tasks", "a,b", "--out", str(tmp_path)]
    assert public.main(given) == 1
    assert asked == ["dense", "kivi", "int4(window=32)"]
    assert json.loads((tmp_path / "int4-window=32.json").read_text())["tasks"] == ["a"]
    rows = list(csv.reader((tmp_path / "table.csv").open()))
    assert rows[1] == ["a/acc", "0.667", "not run", "0.667 (+0.000, +0.000 to +0.000)"]
    assert rows[2] == ["b", "not run", "not run", "not run"]
    assert public.main(given) == 1
    assert asked[3:] == ["kivi"]
