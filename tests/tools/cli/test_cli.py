"""The command line in process: what it prints, its exit status, and its errors for bad input."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.errors import TargetError
from kvcompile.schemes import SCHEMES
from kvcompile.tools.cli import evaluate
from kvcompile.tools.cli.arguments import split
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.targets import TargetOptions, resolve

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

FACTORIES = '''
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Cached(nn.Module):
    def __init__(self, peek=False):
        super().__init__()
        self.peek = peek
        self.register_buffer("k", torch.zeros(1, 2, 32, 64))
        self.register_buffer("v", torch.zeros(1, 2, 32, 64))

    def forward(self, q, k, v, pos):
        self.k[:, :, pos] = k
        self.v[:, :, pos] = v
        mask = torch.arange(32) <= pos[:, None]
        out = sdpa(q, self.k, self.v, attn_mask=mask)
        return out + self.k.mean() if self.peek else out

def inputs():
    x = torch.randn(1, 2, 4, 64)
    return (x, x, x, torch.arange(4))

def good(): return Cached(), inputs()
def peeking(): return Cached(peek=True), inputs()
def alone(): return Cached()
def number(): return 3
def broken(): raise RuntimeError("out of luck")
def failing(): return Cached(), (torch.randn(1, 2, 4, 64),)
'''


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Tests in parallel run in processes that are told the width of the terminal.
    monkeypatch.delenv("COLUMNS", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; (status, stdout, stderr), with lines unwrapped."""

    def call(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_schemes_lists_the_registry(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("schemes", "--heads", "8", "--head-dim", "128", "--layers", "32")
    assert status == 0
    words = " ".join(out.split())
    for scheme in SCHEMES:
        assert scheme.name in out
        assert scheme.source in words
    assert "36 KiB" in out, "int4 in groups of 32: 4.5 bits x 2 x 32 x 8 x 128"


def test_schemes_says_where_a_shape_does_not_fit(run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = run("schemes", "--head-dim", "80")
    assert "not for 80 channels" in out


def test_explain_llama(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("explain", "hf:llama", "--scheme", "int4", "--tokens", "8192")
    assert status == 0
    assert "2 graphs, 4 attentions rewritten" in out
    assert "cache at 8,192 tokens" in out
    # A slow machine is told what the command is at.
    assert not [line for line in err.splitlines() if not line.startswith("hf:llama: ")]


def test_explain_static_eager_with_other_schemes_for_a_layer(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run(
        "explain", "hf:llama", "--cache", "static", "--attention", "eager", "--key-scheme", "int8", "--value-scheme", "int4",
        "--layer", "model.layers.1.*=dense",
    )
    assert status == 0
    assert "keys int8, values int4" in out
    assert "dense" in out
    assert "matmul-softmax-matmul" in out


def test_explain_a_factory(run: Callable[..., tuple[int, str, str]], module: Path) -> None:
    status, out, _ = run("explain", f"{module}:good")
    assert status == 0
    assert "1 graph, 1 attention rewritten" in out
    assert "2/2 heads of 64" in out
    assert "index_put_" in out


def test_strict_reports_first_and_then_fails(run: Callable[..., tuple[int, str, str]], module: Path) -> None:
    status, out, _ = run("explain", f"{module}:peeking", "--strict")
    assert status == 1
    assert "refused, stays as it was" in out
    assert "also read by mean" in out
    assert "factories.py:" in out
    assert run("explain", f"{module}:peeking")[0] == 0


def test_dump_is_plain_text_when_piped(run: Callable[..., tuple[int, str, str]], module: Path) -> None:
    status, out, _ = run("dump", f"{module}:good", "--stage", "rewritten", "--variant", "past")
    assert status == 0
    assert "torch.ops.kvcompile.attend.default(" in out
    assert "\x1b[" not in out


def test_dump_to_a_file(run: Callable[..., tuple[int, str, str]], module: Path, tmp_path: Path) -> None:
    target = tmp_path / "graph.txt"
    status, out, err = run("dump", f"{module}:good", "--stage", "normalised", "-o", str(target))
    assert status == 0
    assert not out
    assert "lines" in err
    assert "site 0" in target.read_text()


def test_dump_of_a_refused_graph_says_so(run: Callable[..., tuple[int, str, str]], module: Path) -> None:
    status, _, err = run("dump", f"{module}:peeking", "--stage", "rewritten")
    assert status == 2
    assert "expected a graph with a rewritten attention" in err


@pytest.mark.parametrize(("target", "why"), [
    ("hf:lama", "did you mean hf:llama"),
    ("hf:clip", "could not be built"),
    ("no/such/folder", "there is no such folder"),
    ("model.py", "name the function"),
    ("missing.py:make", "there is no file missing.py"),
])
def test_bad_targets(run: Callable[..., tuple[int, str, str]], target: str, why: str) -> None:
    status, out, err = run("explain", target)
    assert status == 2
    assert not out
    assert why in err


@pytest.mark.parametrize(("name", "why"), [
    ("goood", "did you mean 'good'"),
    ("alone", "return (module, inputs) instead"),
    ("number", "returned int"),
    ("broken", "raised RuntimeError: out of luck"),
    ("failing", "calling it raised TypeError"),
])
def test_bad_factories(run: Callable[..., tuple[int, str, str]], module: Path, name: str, why: str) -> None:
    status, _, err = run("explain", f"{module}:{name}")
    assert status == 2
    assert why in err


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"has no config\.json"):
        resolve(str(tmp_path), TargetOptions())


@pytest.mark.parametrize(("scheme", "why"), [("int5", "expected one of the schemes"), ("int4(group=5)", "a power of two")])
def test_bad_schemes_are_refused_before_the_target_is_read(run: Callable[..., tuple[int, str, str]], scheme: str, why: str) -> None:
    status, _, err = run("explain", "no/such/folder", "--scheme", scheme)
    assert status == 2
    assert why in err


def test_sliding_layers_are_kept_beside_full_ones() -> None:
    config = resolve("hf:gemma3_text", TargetOptions()).model.config
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_split_at_outer_commas() -> None:
    assert split("int8, int4(group=16,scale_dtype=float32),") == ["int8", "int4(group=16,scale_dtype=float32)"]


@pytest.mark.slow
def test_eval_prints_the_telemetry_of_certified_attention(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed, of as little text as has every line of it; figures are held by the test of JSON."""
    monkeypatch.setattr(evaluate, "QUICK", replace(evaluate.QUICK, tail=6, batch=2))
    status, out, _ = run(
        "eval", "--quick", "--schemes", "dense,certified(certify=k_max:2)", "--context", "256", "--questions", "1", "--telemetry"
    )
    assert status == 0
    words = " ".join(out.split())
    for said in ("head-steps", "candidate key", "rung head", "cause boundary", "keys in full precision"):
        assert said in words


@pytest.mark.slow
def test_eval_as_json(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("eval", "--quick", "--schemes", "int4", "--context", "256", "--questions", "8", "--json")
    assert status == 0
    figures = json.loads(out)
    (int4,) = figures["schemes"]
    assert int4["agreement"]["hits"] > 0.85 * int4["agreement"]["trials"]
    assert 0 < int4["kl"] < 0.2
    assert abs(int4["bits_per_byte"] - figures["reference_bits_per_byte"]) < 0.3
    assert int4["cache_bytes"] < 0.2 * int4["dense_bytes"]
    assert int4["needle"]["hits"] >= 7


def test_bench_runs_a_benchmark_of_the_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    assert "attention" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "step" in capsys.readouterr().out


def test_pictures_are_drawn_from_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = runpy.run_path(str(BENCHMARKS / "plot.py"))
    drawn["draw"](BENCHMARKS / "attention_h200.json", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="no rows"):
        drawn["draw"](tmp_path / "empty.json", tmp_path / "picture.png")


def test_tables_are_also_json(run: Callable[..., tuple[int, str, str]], module: Path) -> None:
    status, out, _ = run("schemes", "--json", "--head-dim", "96")
    rows = {row["scheme"]: row for row in json.loads(out)}
    assert status == 0 and rows["int8"]["of_dense"] == pytest.approx(0.5104, abs=1e-4)
    assert rows["int4"]["options"]["rotate"]["spellings"] == ["none", "k", "kv"]
    status, out, _ = run("explain", f"{module}:peeking", "--json", "--strict")
    found = json.loads(out)
    assert status == 1 and found["refused"] == 1 and found["graphs"][0]["refusals"][0]["stage"] == "match"


@pytest.mark.parametrize(("scheme", "says"), [
    ("int4(rotate=q)", "rotate to be one of none, k, kv, found 'q'"), ("INT4", "did you mean 'int4'"), ("Kivy", "did you mean 'kivi'"),
])
def test_errors_list_spellings_and_suggest_whatever_the_case(run: Callable[..., tuple[int, str, str]], scheme: str, says: str) -> None:
    status, _, err = run("explain", "hf:llama", "--scheme", scheme)
    assert status == 2 and says in err


def test_a_type_in_capitals_is_suggested(run: Callable[..., tuple[int, str, str]]) -> None:
    assert "did you mean hf:llama" in run("explain", "hf:LLAMA")[2]
