"""What is written is what was measured: JSON and CSV round trips, tables' cells, discordant pairs, pictures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from kvcompile.errors import BadEvaluation, ResultsUnread
from kvcompile.tools.evaluation.measures import Answer, Held, LayerError, Measured, Text
from kvcompile.tools.evaluation.plots import draw, style
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.statistics import Proportion
from kvcompile.tools.evaluation.tables import beside_table, cell, heatmap, layer_table, paired_table, summary_table


def answer(number: int, right: bool, length: int = 600, depth: float = 0.0, said: str = "7\n") -> Answer:
    return Answer(f"needle/{length}/{depth}/{number}", "needle", length, depth, "7", said if right else "8\n", right, float(right))


def measured(scheme: str, outcomes: list[bool], allocated: int = 0) -> Measured:
    answers = tuple(answer(number, right, (600, 900)[number % 2], (0.0, 0.5)[number // 2 % 2]) for number, right in enumerate(outcomes))
    texts = tuple(Text(length, (0.9, 1.1), (0.01, 0.03), (30, 31), 32) for length in (600, 900))
    held = (Held(600, allocated, 1000), Held(900, 2 * allocated, 2000)) if allocated else ()
    layers = (LayerError(600, "layers.0", 0.1, 0.9, 10.0), LayerError(900, "layers.0", 0.3, 0.7, 20.0)) if allocated else ()
    return Measured(scheme, texts, layers, answers, held, 1.5, 3, (), {"head_steps": 0.0})


@pytest.fixture
def results() -> Results:
    config = {"model": "m", "dtype": "float32", "unit": "bytes", "inner": "eager", "batch": 2, "questions": 4, "seed": 0}
    dense = measured("uncompressed", [True, True, True, True, False, False, True, True])
    ours = measured("int4[x]", [True, False, True, True, True, False, False, True], 300)
    return Results(config, {"device": "cpu"}, replace(dense, texts=tuple(replace(text, kl=(0.0, 0.0)) for text in dense.texts)), (ours,))


def printed(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_json_round_trip(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path)
    read = Results.load(tmp_path / "results.json")
    assert read == results and read.plain() == results.plain()
    assert json.loads((tmp_path / "config.json").read_text())["machine"] == {"device": "cpu"}
    for damage in ("{}", "[1", '{"format": 0}'):
        (tmp_path / "results.json").write_text(damage)
        with pytest.raises(ResultsUnread, match="measure again"):
            Results.load(tmp_path / "results.json")


def test_csv_round_trip(results: Results, tmp_path: Path) -> None:
    results.save(tmp_path)
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [(row["scheme"], row["length"]) for row in rows] == [
        ("uncompressed", "600"), ("uncompressed", "900"), ("int4[x]", "600"), ("int4[x]", "900"),
    ]
    assert (rows[3]["allocated"], rows[3]["dense"], rows[3]["right"], rows[3]["questions"]) == ("600", "2000", "2", "4")
    assert float(rows[2]["kl"]) == pytest.approx(0.02)
    answers = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert len(answers) == 16 and answers[9]["said"] == "8\n" and answers[9]["right"] == "False"


def test_pairs_and_what_differs(results: Results) -> None:
    found = results.compared(results.schemes[0])
    paired = found.paired["needle"]
    assert (paired.both, paired.lost, paired.won, paired.neither) == (4, 2, 1, 1) and found.paired["all"] == paired
    assert [(item["kind"], item["dense"], item["scheme"]) for item in found.discordant] == [
        ("lost", "7\n", "8\n"), ("won", "8\n", "7\n"), ("lost", "7\n", "8\n"),
    ]
    assert all(item["expected"] == "7" and item["question"].startswith("needle/") for item in found.discordant)
    assert found.kl.value == pytest.approx(0.02) and found.bits.value == 0.0


def test_schemes_beside_each_other(results: Results) -> None:
    """Lost and won change sides with the base; KL is a difference in pairs of texts."""
    int4 = results.schemes[0]
    other = measured("kivi", [True, True, False, True, False, False, False, False], 150)
    other = replace(other, texts=tuple(replace(text, kl=(0.04, 0.05), bits=(1.0, 1.3)) for text in other.texts))
    both = replace(results, schemes=(int4, other))
    found, back = both.beside(other, int4), both.beside(int4, other)
    paired = found.paired["all"]
    assert (paired.both, paired.lost, paired.won, paired.neither) == (2, 3, 1, 2)
    assert (back.paired["needle"].lost, back.paired["needle"].won) == (1, 3)
    assert found.kl.value == pytest.approx(0.025) == -back.kl.value and found.kl.low >= 0.02 and found.kl.high <= 0.03
    assert found.bits.value == pytest.approx(0.15)
    row = next(line.split() for line in printed(beside_table(both, int4)).splitlines() if line.strip().startswith("kivi"))
    assert row[:8] == ["kivi", "50.0%", "+0.025", "+0.150", "2", "3", "1", "2"]
    assert both.named("kivi") is other
    with pytest.raises(BadEvaluation, match="int4"):
        both.named("int8")


def test_summary_is_over_lengths_and_bytes_are_those_of_the_longest(results: Results) -> None:
    row = results.schemes[0]
    assert (row.cache_bytes, row.dense_bytes) == (600, 2000)
    assert row.bits_per_byte == pytest.approx(1.0) and row.agreement == Proportion(122, 128)
    text = printed(summary_table(results))
    assert "int4[x]" in text and "30.0%" in text and "2, 1" in text and "62.5%" in text
    assert "needle 6/8" in text


def test_cells_of_a_heatmap(results: Results) -> None:
    text = printed(heatmap((results.reference, *results.schemes), "needle", "bytes"))
    lines = [line.split() for line in text.splitlines() if "%" in line]
    assert lines == [
        ["uncompressed", "0%", "1/2", "1/2"], ["50%", "2/2", "2/2"], ["int4[x]", "0%", "2/2", "0/2"], ["50%", "1/2", "2/2"],
    ]
    assert cell(Proportion(0, 0)).plain == ""
    assert "red" in str(cell(Proportion(0, 4)).style) and "green" in str(cell(Proportion(4, 4)).style)


def test_tables_of_layers_and_pairs(results: Results) -> None:
    assert "15.0 dB  0.8000  2.0e-01" in printed(layer_table(results.schemes))
    assert "-12.5%" in printed(paired_table(results))


def test_pictures(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(results, tmp_path)
    assert [path.name for path in drawn] == ["bytes.png", "length.png", "heatmaps.png"]
    assert all(path.stat().st_size > 5_000 for path in drawn)
    assert draw(replace(results, schemes=()), tmp_path) == []
    assert len({tuple(style(number).values()) for number in range(70)}) == 70
