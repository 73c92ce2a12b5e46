"""``kvcompile learn``: from text files to tables that a backend serves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import in_two_processes

from kvcompile.errors import BadBatch
from kvcompile.extensions.beyond.learning.text import TokenEncoding, batches, documents, sequences, split
from kvcompile.extensions.beyond.storage import load_tables
from kvcompile.tools.cli.arguments import parser
from kvcompile.tools.cli.learn import held_apart
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.targets import TargetOptions, resolve

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 40
SMALL = [
    "--bytes", "--length", "33", "--steps", "3", "--batch", "4", "--micro", "2", "--validation", "4", "--inner", "eager",
    "--dtype", "float32",
]


@pytest.fixture(name="data")
def text_file(tmp_path: Path) -> Path:
    """A file of text."""
    (tmp_path / "data.txt").write_text(TEXT)
    return tmp_path / "data.txt"


def test_tables_are_learned_from_a_file_and_fit_the_model(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tinylm = data.with_name("tables.safetensors"), "examples/tinylm"
    run = data.with_name("run")
    assert main(["learn", tinylm, "--data", str(data), "--out", str(out), "--folder", str(run), *SMALL, "--scheme", "beyond(bits=3)"]) == 0
    assert "nats a token" in " ".join(capsys.readouterr().err.split())
    model = resolve(tinylm, TargetOptions(dtype=torch.bfloat16)).model
    scheme = load_tables(out, model)
    assert scheme.bits == 3 and scheme.trained
    assert json.loads((run / "config.json").read_text())["settings"]["batch"] == 4


@pytest.mark.parametrize(("changed", "found"), [
    (["--scheme", "int4"], "only the scheme 'beyond' has tables to learn"), (["--prefix", "chat"], "bytes have no chat template"),
    (["--validation", "400"], "expected more than 400 sequences"), (["--length", "2"], "expected sequences longer than the prefix"),
])
def test_what_cannot_be_done_is_said(data: Path, changed: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.with_name("tables.safetensors")
    assert main(["learn", "examples/tinylm", "--data", str(data), "--out", str(out), *SMALL, *changed]) == 2
    assert found in " ".join(capsys.readouterr().err.split()) and not out.exists()


def test_a_small_text_holds_less_out_or_names_the_two_options(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = parser().parse_args(["learn", "m", "--data", str(data), "--out", "x", "--length", "33"])
    tokens = TokenEncoding(lambda text: list(text.encode()), (1,))
    training, held_out = held_apart(given, tokens)
    assert (len(training), len(held_out)) == (62, 15) and given.held_out == 150
    given = parser().parse_args(["learn", "m", "--data", str(data), "--out", "x"])
    with pytest.raises(BadBatch, match=r"8,192 tokens.*2,480 tokens; pass --length 249 --validation 2"):
        held_apart(given, tokens)
    given = parser().parse_args(["learn", "m", "--data", str(data), "--out", "x", "--length", "249", "--validation", "2"])
    assert [len(part) for part in held_apart(given, tokens)] == [8, 2]
    data.write_text("short")
    with pytest.raises(BadBatch, match="pass more text"):
        held_apart(given, tokens)


def test_text_becomes_sequences_behind_a_prefix_that_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefg")
    (tmp_path / "b.jsonl").write_text('{"text": "hij"}\n\n{"text": "klmnopq"}\n')
    tokens = TokenEncoding(lambda text: list(text.encode()), (1, 2))
    runs = sequences(documents([tmp_path / "a.txt", tmp_path / "b.jsonl"]), tokens, 6)
    assert [bytes(run) for run in runs] == [b"abcd", b"efgh", b"ijkl", b"mnop"]
    (first, second) = batches(runs, tokens, 3)
    assert first["input_ids"].shape == (3, 6) and second["input_ids"].shape == (1, 6)
    assert first["input_ids"][0].tolist() == [1, 2, *b"abcd"] and first["loss_mask"][0].tolist() == [False, False, True, True, True, True]
    training, held_out = split(runs, 1)
    assert sorted(map(bytes, training + held_out)) == sorted(map(bytes, runs)) and len(held_out) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_files_that_are_no_text_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(BadBatch, match="expected text in UTF-8"):
        list(documents([tmp_path / "x.txt"]))


def test_lines_without_a_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(BadBatch, match="lines of JSON with a text"):
        list(documents([tmp_path / "x.jsonl"]))


@pytest.mark.slow
def test_two_processes_learn_what_one_does(data: Path) -> None:
    """``torchrun``: each has half of every batch; gradients add up before they are rectified."""
    common = ["learn", "examples/tinylm", "--data", str(data), *SMALL, "--validation", "4", "--device", "cpu"]
    alone, together = data.with_name("one.safetensors"), data.with_name("two.safetensors")
    assert main([*common, "--out", str(alone), "--folder", str(data.with_name("run1"))]) == 0
    in_two_processes("-m", "kvcompile", *common, "--out", str(together), "--folder", str(data.with_name("run2")), port=29517)
    losses = [
        [line["loss"] for line in map(json.loads, (data.with_name(run) / "log.jsonl").read_text().splitlines()) if "loss" in line]
        for run in ("run1", "run2")
    ]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)
