"""Tables 3 to 10 of the certified source: their cells from records that are known, and the command that measures them."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.extensions.certified.certified_quality import CODES, DEFAULTS, SCHEMES, Run, command, tables
from kvcompile.errors import BadEvaluation
from kvcompile.schemes import Certified, parse
from kvcompile.schemes.certificate.policy import NAIVE, parse_policy
from kvcompile.tools.evaluation.bench import labels
from kvcompile.tools.evaluation.measures import Answer, Held, Measured, Text
from kvcompile.tools.evaluation.results import Results

LENGTHS = (600, 900)


def measured(label: str, wrong: int, bits: float) -> Measured:
    """Four questions of two tasks at two lengths, the first ``wrong`` of each four lost."""
    answers = tuple(
        Answer(f"{task}/{length}/{number}", task, length, 0.0, "7", "7" if number >= wrong else "8", number >= wrong, 1.0)
        for length in LENGTHS for task in ("multiquery", "variable") for number in range(4)
    )
    texts = tuple(Text(length, (bits, bits + 0.1), (0.0, 0.0), (32, 32), 32) for length in LENGTHS)
    asked = {"head_steps": 10.0, "keys": 200.0, "values": 5.0, "blocks": 400.0} if label.startswith("certified") else {}
    return Measured(label, texts, (), answers, tuple(Held(length, 600, 1000) for length in LENGTHS), asked=asked)


def printed(schemes: tuple[Measured, ...]) -> dict[str, list[list[str]]]:
    """Rows of words by the first two words of each table's title."""
    config = {"model": "m", "unit": "bytes", "seed": 0}
    made = {}
    for table in tables(Run(Results(config, {}, measured("uncompressed", 0, 0.8), schemes))):
        console = Console(width=190, file=io.StringIO(), record=True)
        console.print(table)
        lines = [line.split() for line in console.export_text().splitlines()]
        made[" ".join(lines[0][:2]).rstrip(":,")] = lines[1:]
    return made


def test_cells() -> None:
    naive, swept = labels([CODES])[0][1], labels(["certified(certify=v_tol:0.02)"])[0][1]
    found = printed((measured(naive, 3, 1.0), measured("certified", 1, 0.81), measured(swept, 0, 0.8)))
    assert list(found) == [f"Table {number}" for number in range(3, 11)]
    assert ["multiquery,", "naive", "1/4", "(3,", "0;", "p", "0.25)", "1/4", "(3,", "0;", "p", "0.25)"] in found["Table 4"]
    assert ["all", "questions,", "certified", "6/8", "(2,", "0;", "p", "0.5)", "6/8", "(2,", "0;", "p", "0.5)"] in found["Table 4"]
    bits = next(row for row in found["Table 3"] if row[:1] == ["bits"])
    assert bits[3:7] == ["+0.0100", "(+0.0100", "to", "+0.0100)"]
    assert ["lost", "(critical)", "2", "2"] in found["Table 6"]
    assert ["variable", "4/4", "3/4", "-25.0%", "1", "0"] in found["Table 7"] == found["Table 8"]
    rows = {" ".join(row[:2]): row for row in found["Table 9"] if len(row) > 8}
    assert rows["K_max 128"][2:4] == ["-25.0%", "-25.0%"] and rows["K_max 128"][-7:] == ["4/16", "0", "0.12", "0", "60.0%", "1.2%", "20"]
    assert rows["v_tol 0.02"][2:4] == ["+0.0%", "+0.0%"] and "K_max 64" not in rows
    assert ["uncompressed", "alone", "(critical)", "1", "1"] in found["Table 10"]
    assert ["both,", "neither", "3,", "0", "3,", "0"] in found["Table 10"]


def test_a_run_without_certified_is_refused() -> None:
    with pytest.raises(BadEvaluation, match="certified"):
        printed((measured("int4", 0, 1.0),))


def test_the_command_has_the_naive_baseline_and_every_setting() -> None:
    options = argparse.Namespace(model="tinylm", out=Path("x"))
    made = command(options, ["--lengths", "400", "--device", "cuda"])
    assert made.count("--lengths") == 1 and made[-4:] == ["--lengths", "400", "--device", "cuda"]
    assert made[made.index("--questions") + 1] == DEFAULTS["--questions"] and len(set(SCHEMES)) == len(SCHEMES) == 10
    naive = parse(CODES)
    assert isinstance(naive, Certified) and parse_policy(naive.certify) == NAIVE
