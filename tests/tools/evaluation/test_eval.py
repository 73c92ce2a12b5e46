"""The whole command: a checkpoint with a tokenizer and tinylm, what is compiled, what a broken scheme shows, errors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile import schemes
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.subjects import tinylm
from kvcompile.tools.evaluation.bench import QUICK, Bench
from kvcompile.tools.evaluation.decoding import forced
from kvcompile.tools.evaluation.results import Results

SMALL = ("--questions", "3", "--tail", "6", "--batch", "2", "--lengths", "200,300", "--device", "cpu")


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors on one thread, nothing compiled before."""
    monkeypatch.delenv("COLUMNS", raising=False)


@dataclass(frozen=True)
class Coarse(kvcompile.Int8):
    """Integers of eight bits of which the upper two count: a scheme that is wrong on purpose."""

    name = "coarse"

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, *others = super().encode(x)
        return ((codes >> 6) << 6, *others)


def test_a_broken_scheme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemes.BY_NAME, Coarse.name, Coarse)
    effort = replace(QUICK, lengths=(300,), tail=12, questions=8, tasks=("needle",), batch=4, attention=True)
    bench = Bench(tinylm(), effort)
    reference = bench.reference()
    good, broken = bench.measure("int8"), bench.measure(Coarse(), "coarse")
    results = Results({"seed": 0}, {}, reference, (good, broken))
    assert reference.share().hits == 8 and good.share().hits >= 7
    assert good.kl < 1e-3 and broken.kl > 0.1 and broken.share().hits <= 4
    assert len(good.layers) == 6 and all(item.cosine > 0.99 and item.snr > 20 for item in good.layers)
    assert max(item.mse for item in broken.layers) > 100 * max(item.mse for item in good.layers)
    found = results.compared(broken)
    assert found.paired["needle"].lost == 8 - broken.share().hits and found.kl.low > results.compared(good).kl.high
    assert good.graphs == 2, "a prompt's graph and a step's"


def test_dense_is_the_uncompressed_model() -> None:
    bench = Bench(tinylm(), replace(QUICK, lengths=(300, 200), tail=5, questions=2, tasks=("variable",), batch=2, attention=True))
    reference, dense = bench.reference(), bench.measure("dense")
    assert [item.said for item in dense.answers] == [item.said for item in reference.answers]
    assert dense.kl == pytest.approx(0, abs=1e-9) == reference.kl and dense.agreement.value == 1.0
    assert dense.bits_per_byte == pytest.approx(reference.bits_per_byte, abs=1e-5)
    assert {item.length for item in dense.layers} == {200, 300} and all(item.snr > 90 for item in dense.layers)
    # A prompt's graph for each length, and one of all steps: caches of all lengths have one capacity.
    assert dense.graphs == 3
    assert [item.dense for item in dense.held] == [2 * 6 * 2 * 2 * 64 * 4 * (length + 5) for length in (300, 200)]


def test_bits_per_byte_are_those_of_decoding_by_hand() -> None:
    bench = Bench(tinylm(), replace(QUICK, lengths=(150,), tail=6, questions=1, tasks=("needle",), batch=2))
    ids, subject = bench.ids[150], bench.subject
    with torch.no_grad():
        logits = torch.stack(list(forced(subject.model, ids, 151, subject.cache(200), {})), 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 151:].flatten()) / torch.tensor(2.0).log()
    assert bench.reference().bits_per_byte == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=[pytest.mark.compile, pytest.mark.slow])])
def test_a_checkpoint_with_a_tokenizer(
    inner: str, checkpoint: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    asked = ("eval", str(checkpoint), "--data", str(book), "--schemes", "dense,int4", "--tasks", "needle,common", "--out", str(out))
    assert main([*asked, "--inner", inner, "--dtype", "float32", *SMALL, "--heatmaps"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 200, 300 tokens" in printed and "McNemar" in printed and "needle: right answers by depth" in printed
    results = Results.load(out / "results.json")
    dense, int4 = results.schemes
    assert results.config["rule"] == "parts" and results.config["inner"] == inner and results.lengths == (200, 300)
    assert dense.agreement.value == 1.0 and dense.kl < 1e-6 < int4.kl < 0.1
    assert [item.said for item in dense.answers] == [item.said for item in results.reference.answers]
    assert len(int4.answers) == 2 * 2 * 3 and int4.cache_bytes < 0.4 * int4.dense_bytes
    assert {item.path for item in int4.layers} == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert int4.graphs == 3, "a prompt's graph for each length, one for all steps"
    # An installed CUDA build does not say in its package's version what it is a build for.
    assert results.machine["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"results.json", "config.json", "summary.csv", "answers.csv"} <= {path.name for path in out.iterdir()}
    # The uniform model of 400 ids needs log2(400) bits a token, whose bytes are counted.
    assert 1 < results.reference.bits_per_byte < 9
    assert main([*asked, *SMALL]) == 2
    assert "a folder without a run" in capsys.readouterr().err
    assert main(["eval", "--read", str(out), "--beside", "dense", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["schemes"] == json.loads((out / "results.json").read_text())["schemes"] and read["beside"]["scheme"] == "dense"
    assert read["beside"]["others"]["int4"]["paired"] == read["schemes"][1]["compared"]["paired"], "dense said what the model said"
    assert main(["eval", "--read", str(out), "--beside", "dense"]) == 0
    assert "dense compared with each other scheme" in capsys.readouterr().out


def test_tinylm_as_json_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two schemes side by side, each in a process of its own, are what one process measures."""
    asked = ("--tasks", "needle,multikey", "--depths", "0.5", "--keys", "2", "--lengths", "200", "--jobs", "2", "--json")
    assert main(["eval", "--quick", "--schemes", "kivi,int8", *SMALL, *asked]) == 0
    read = json.loads(capsys.readouterr().out)
    kivi, int8 = read["schemes"]
    paired = kivi["compared"]["paired"]["all"]
    assert paired["trials"] == 6 and paired["lost"] + paired["won"] == len(kivi["compared"]["discordant"])
    assert {item["depth"] for item in kivi["answers"]} == {0.5} and read["config"]["tasks"] == ["needle", "multikey"]
    assert sum("/keys=" in item["question"] for item in kivi["answers"]) == 3
    bench = Bench(tinylm(), replace(
        QUICK, lengths=(200,), tail=6, questions=3, batch=2, depths=(0.5,), tasks=("needle", "multikey"), keys=2,
    ))
    alone = bench.measure("int8")
    assert int8["scheme"] == "int8" and int8["kl"] == alone.kl
    assert [item["said"] for item in int8["answers"]] == [item.said for item in alone.answers]


@pytest.mark.parametrize(("argv", "says"), [
    (["--schemes", "int5"], "expected one of the schemes"), (["--lengths", "many"], "--lengths"), (["--depths", "x"], "--depths"),
    (["no/such/folder", "--data", "x"], "there is no such folder"), (["--data", "no_such_file.txt"], "expects --data to be text in UTF-8"),
    (["--tasks", "niah"], "names among needle"), (["--schemes", "int8", "--beside", "int4"], "a scheme of the run (int8)"),
    (["--read", "no_such_run"], "no_such_run"), (["--schemes", "no_such.safetensors"], "expected a whole file of static scales"),
])
def test_errors_come_before_anything_is_measured(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--quick", *argv]) == 2
    caught = capsys.readouterr()
    assert says in caught.err and not caught.out


def test_files_of_scales_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured scales and learned tables do what they do through the library; a file for another model is refused."""
    monkeypatch.chdir(tmp_path)
    subject = tinylm()
    ids = subject.texts(200, 6, 2)
    scales = kvcompile.calibrate(subject.model, [ids], "int8", granularity="head")
    kvcompile.save_scales(scales, "scales.safetensors")
    learned = kvcompile.learn(subject.model, [ids], kvcompile.Beyond(bits=4), settings=kvcompile.LearnSettings(steps=1))
    kvcompile.save_tables(learned, "tables.safetensors")
    asked = ("--tasks", "needle", "--lengths", "200", "--schemes", "scales.safetensors,tables.safetensors")
    assert main(["eval", "--quick", *SMALL, *asked, "--beside", "scales.safetensors", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [row["scheme"] for row in read["schemes"]] == ["scales.safetensors", "tables.safetensors"] == [
        read["beside"]["scheme"], *read["beside"]["others"],
    ]
    bench = Bench(tinylm(), replace(QUICK, lengths=(200,), tail=6, questions=3, batch=2, tasks=("needle",)))
    for row, scheme in zip(read["schemes"], (scales, learned), strict=True):
        assert row["kl"] == bench.measure(scheme).kl > 0 and not row["refusals"]
    assert main(["eval", "tinylm-16k", *SMALL, "--schemes", "tables.safetensors"]) == 2
    assert "tables for this model" in capsys.readouterr().err


def test_every_prediction_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that holds nothing but zeros changes the first prediction behind a prompt, and an answer's only token."""
    monkeypatch.setattr(Coarse, "encode", lambda self, x: tuple(torch.zeros_like(part) for part in kvcompile.Int8.encode(self, x)))
    monkeypatch.setitem(schemes.BY_NAME, Coarse.name, Coarse)
    bench = Bench(tinylm(), replace(QUICK, lengths=(300,), tail=1, questions=6, tasks=("counts",), batch=3))
    assert bench.measure("dense").kl == pytest.approx(0, abs=1e-9)
    nothing = bench.measure(Coarse(), "nothing")
    assert nothing.kl > 0.1 and min(nothing.texts[0].kl) > 0
    assert [item.said for item in nothing.answers] != [item.said for item in bench.reference().answers]
