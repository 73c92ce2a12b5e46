"""``kvcompile plan``: a configuration, factories that it can and cannot plan for, JSON, formulas, and errors for bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.passes.plan.policy import policy_of
from kvcompile.serving.block_layout import BlockLayout
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.plan_target import model_of
from kvcompile.tools.planner.stores import BATCH, page_symbol

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 2, "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "awq", "bits": 4},
}
FACTORY = '''
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Cached(nn.Module):
    def __init__(self, peek=False):
        super().__init__()
        self.peek = peek
        self.register_buffer("k", torch.zeros(1, 2, 640, 64))
        self.register_buffer("v", torch.zeros(1, 2, 640, 32))

    def forward(self, q, k, v, pos):
        self.k[:, :, pos] = k
        self.v[:, :, pos] = v
        out = sdpa(q, self.k, self.v, attn_mask=torch.arange(640) <= pos[:, None])
        return out + self.k.mean() if self.peek else out

x, y = torch.randn(1, 2, 4, 64), torch.randn(1, 2, 4, 32)
def good(): return Cached(), (x, x, y, torch.arange(4))
def peeking(): return Cached(peek=True), (x, x, y, torch.arange(4))
def plain(): return nn.Linear(4, 4), (torch.randn(2, 4),)
'''


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Write a config.json and return its path."""
    def write(**changes: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**CONFIG, **changes}))
        return str(path)
    return write


@pytest.fixture
def factory(tmp_path: Path) -> str:
    """The path of a file of factories."""
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return str(path)


def test_a_configuration_as_json(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu-memory", "8", "--context", "8192", "--batch", "4", "--weights", "int4", "--schemes", "dense,int4,kivi", "--json"]
    assert main(["plan", config(), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert found["slots"] == 4
    assert rows["dense"]["device_bytes_per_request"] == 4 * 8192 * 8 * 128 * 2 == rows["dense"]["dense_bytes"] // 4
    assert rows["int4"]["bytes_per_token"] == 4 * 8 * (64 + 8)
    assert rows["kivi"]["shares"]["window"] == 4 * 4 * (8 * 32 * 128 * 2 + 8 * 16)
    matrices = 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert found["weight_bytes"] == pytest.approx(matrices * 4.15625 / 8 + 2 * 128256 * 4096 * 2, rel=1e-3)
    # 4 layers of this shape were measured: 0.81 GB above the weights for 8,192 tokens, of which int4's cache is 0.04 (docs/PERFORMANCE.md).
    assert found["activation_bytes"] + 2 * rows["int4"]["device_bytes_per_request"] == pytest.approx(0.81e9, rel=0.01)
    for row in rows.values():
        assert row["needed_bytes"] == sum((
            found["weight_bytes"], found["activation_bytes"], found["overhead_bytes"], row["device_bytes"], row["growing_bytes"],
        ))
        assert row["fits"] == (row["needed_bytes"] <= found["memory_bytes"]) == (row["largest_batch"] >= 4)
    assert found["recommended"] == "dense"
    assert found["most_requests"] == "dense"


def test_tables_and_formulas(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config(), "--context", "64", "--schemes", "dense,int8,squat-pre", "--symbolic", "--gpu", "sm_80"]) == 0
    text = capsys.readouterr().out
    for words in ("4 cache slots", "largest", "recommended: dense", "int8: 266240*B*N", "pages of 64 tokens", "squat-pre:"):
        assert words in text


def test_sliding_windows_end(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """A window's layer holds its window, whatever the context; a scheme with blocks leaves it dense and says why."""
    path = config(
        model_type="gemma3_text", num_hidden_layers=6, head_dim=128, sliding_window=1024, layer_types=None, quantization_config=None,
        intermediate_size=4096,
    )
    assert main(["plan", path, "--context", "4096", "--schemes", "dense,int8,kivi", "--json"]) == 0
    rows = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)["schemes"]}
    token = 2 * 8 * 128 * 2
    assert rows["dense"]["device_bytes"] == 5 * 1024 * token + 4096 * token
    assert rows["dense"]["bytes_per_token"] == token
    assert rows["kivi"]["shares"]["left"] == 5 * 1024 * token
    assert "keeps its newest 1024 tokens" in rows["kivi"]["left_dense"][0]


def test_activations_grow_with_the_prompt(config: Callable[..., str]) -> None:
    path = config(vocab_size=1000)
    short, long = (model_of(path, 4096, tokens, None).activations for tokens in (512, 2048))
    assert short.nbytes(4096) == pytest.approx(long.nbytes(4096), rel=0.01)
    assert all(pair == 0 for _, pair in long.moments)


def test_scores_that_stay_grow_with_pairs(config: Callable[..., str]) -> None:
    """A sliding layer's prompt attends to its own tokens: where that is written by hand, its scores are in memory."""
    path = config(model_type="gpt_oss", quantization_config=None, num_local_experts=4, sliding_window=128, layer_types=None)
    short, long = (model_of(path, 4096, tokens, None).activations for tokens in (512, 2048))
    for tokens in (512, 4096, 1 << 17):
        assert short.nbytes(tokens) == pytest.approx(long.nbytes(tokens), rel=0.3)
    # The scores of 32 heads in bfloat16, at least once.
    assert long.nbytes(1 << 17) > 32 * 2 * (1 << 34)


def test_formula_of_a_factory(factory: str) -> None:
    model = model_of(f"{factory}:good", 640, 4, None)
    stores = model.stores(policy_of("int8"), 640)
    assert [(item.slot.heads, item.slot.head_dim, item.end) for item in stores.stored] == [(2, 64, 640), (2, 32, 640)]
    assert stores.formula == BATCH * page_symbol(640) * 64 * 2 * ((64 + 2) + (32 + 2))
    assert stores.device_bytes(1, 640) == 640 * 2 * (66 + 34)


@pytest.mark.parametrize(("asked", "words"), [
    (["FACTORY:good", "--context", "641"], "caches with room for 641 tokens"),
    (["FACTORY:peeking", "--context", "64"], "attention over a cache of keys and values"),
    (["FACTORY:plain"], "none in any graph"),
    (["/nowhere/config.json"], "there is no such config.json"),
    (["hf:lama"], "no model type 'lama'"),
    (["FACTORY:good", "--context", "64", "--weights", "int3"], "it is none of native, fp8, int8, int4"),
    (["FACTORY:good", "--schemes", "int5"], "int5"),
])
def test_errors(factory: str, asked: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(item.replace("FACTORY", factory) for item in asked)]) == 2
    assert words in capsys.readouterr().err


def test_weights_in_gigabytes(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{factory}:good", "--context", "64", "--weights", "1.5", "--schemes", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == 1_500_000_000
    assert torch.is_grad_enabled()


def test_the_answer_comes_first_and_the_line_to_paste_last(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu-memory", "8", "--context", "8192", "--batch", "4", "--weights", "int4", "--schemes", "dense,int4"]
    assert main(["plan", config(), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "recommended: dense for 4 x 8,192 tokens"
    assert lines[-1] == 'model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme="dense"))'


def test_weights_that_fill_the_card_are_to_be_smaller(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Too many requests for the native weights: what fits is said, and what four-bit weights would give."""
    asked = ["--gpu-memory", "5", "--overhead", "0.2", "--context", "8192", "--batch", "128", "--schemes", "dense,int8,int4", "--json"]
    assert main(["plan", config(), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["scheme"]: row for row in found["schemes"]}
    label = found["most_requests"]
    assert found["recommended"] is None and 0 < rows[label]["largest_batch"] < 128
    assert found["python"].endswith(f'(scheme="{label}"))  # {rows[label]["largest_batch"]} requests at once')
    assert f"now {rows[label]['largest_batch']}" in found["lighter_weights"] and "--weights int4" in found["lighter_weights"]
    assert main(["plan", config(), *asked[:-1], "--weights", "int4", "--json"]) == 0
    lighter = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)["schemes"]}
    assert f"{label} serves {lighter[label]['largest_batch']} requests" in found["lighter_weights"]


def test_settings_with_the_same_numbers_share_a_row(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config(), "--context", "64"]) == 0
    text = capsys.readouterr().out
    (count,) = re.findall(r"squat \(\+(\d)\) .*\n", text)[:1]
    assert int(count) >= 7 and f"{count} settings of squat" in " ".join(text.split())
    assert "squat-pre" not in text and "squat-longbench" not in text


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_is_told_what_its_blocks_hold(engine: str, config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path, pair = config(), "k=int8,v=int4"
    asked = ["plan", path, "--engine", engine, "--context", "1000", "--schemes", f"dense,int4,{pair},kivi"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["scheme"]: row for row in found["schemes"]}
    assert list(rows) == ["dense", "int4", pair] and "window" in found["refused"]["kivi"]
    for label, (keys, values) in {"dense": ("dense", "dense"), "int4": ("int4", "int4"), pair: ("int8", "int4")}.items():
        token = 2 * BlockLayout.of(keys, 8, 128, values=values).token_bytes
        row = rows[label]
        assert row["bytes_per_token"] == token
        assert 0 <= found["memory_for_blocks"] - row["tokens"] * token < 16 * token
        assert row["tokens"] % 16 == 0 and row["requests"] == row["tokens"] // 1008
        assert row["dense_tokens"] == row["tokens"] * token // (2 * 2 * 8 * 128 * 2)
    assert found["recommended"] == "dense" and ("--attention-backend CUSTOM" in found["command"]) == (engine == "vllm")
    assert main(asked) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == found["command"] and f"{rows['dense']['tokens']:,} tokens in" in shown[-2]
    assert any(line.startswith("not in blocks: kivi") for line in shown)
    many = str(rows["dense"]["requests"] + 1)
    assert main([*asked, "--json", "--batch", many, "--schemes", "dense"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"] is None, "one request more than there is room for"
