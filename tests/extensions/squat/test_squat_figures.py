"""Figures 2 and 5 of squat's source: deviations of known queries, RoPE as the model turns, changes of scores, the whole command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.extensions.squat import squat_figures
from benchmarks.extensions.squat.squat_figures import Heads, attentions, changes, deviations, heads_of
from kvcompile.tools.cli.subjects import tinylm

pytestmark = pytest.mark.usefixtures("one_thread")


def test_queries_within_a_span_do_not_deviate() -> None:
    draw = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(2, 16, 16, generator=draw)).Q[:, :3]
    q, spans = (torch.randn(2, count, 3, generator=draw) @ directions for count in (40, 50))
    found = deviations(q, spans)
    # In float32 queries: what is left of a square of 1 is some 1e-7, its root some 3e-4.
    assert found.shape == (16,) and found[0] > 0.3 and found[2:].max() < 1e-3
    noise = deviations(torch.randn(2, 4000, 16, generator=draw), torch.randn(2, 4000, 16, generator=draw))
    expected = (1 - torch.arange(1, 17) / 16).sqrt()
    # The mean of a root is below the root of the mean, the more the fewer channels are left.
    assert torch.allclose(noise[:8].float(), expected[:8], atol=0.015) and bool((noise <= expected + 1e-3).all())


def test_heads_are_those_that_the_model_attends_with() -> None:
    """Scores of one head make the outputs that the model's own attention has."""
    subject = tinylm()
    ids = subject.texts(60, 4, 1)[0]
    heads = heads_of(subject.model, ids)
    path, module = next(iter(attentions(subject.model).items()))
    before, after = heads["before"][0], heads["after"][0]
    assert torch.equal(before.turned(before.k), after.k) and torch.equal(before.turned(before.k[:, :9]), after.k[:, :9])
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.v_proj.register_forward_hook(lambda _, inputs, output: seen.__setitem__("v", output)),
        module.o_proj.register_forward_pre_hook(lambda _, inputs: seen.__setitem__("o", inputs[0])),
    ]
    with torch.no_grad():
        subject.model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    values = seen["v"][0].unflatten(-1, (2, -1)).transpose(0, 1)
    scores = after.q @ after.k[:, None].mT * after.k.shape[-1] ** -0.5
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, None]
    assert path and torch.allclose(mixed.flatten(0, 1).transpose(0, 1).flatten(1), seen["o"][0], atol=1e-4)


def test_changes_of_scores_follow_the_codes() -> None:
    draw = torch.Generator().manual_seed(1)
    angles = torch.rand(1, 100, 8, generator=draw).repeat(1, 1, 2)
    heads = Heads(torch.randn(2, 2, 100, 16, generator=draw), torch.randn(2, 100, 16, generator=draw), (angles.cos(), angles.sin()))
    turned = Heads(heads.q, heads.turned(heads.k), heads.angles)
    coarse, fine = changes("kivi", heads, heads, 64), changes("kivi(bits=4)", heads, heads, 64)
    assert all(4 * low < high < 6 * low for low, high in zip(fine, coarse, strict=True)), "15 levels in place of 3"
    assert changes("squat(lam=0.0)", heads, turned, 64) == changes("kivi", heads, turned, 64) != coarse
    # RoPE keeps norms, so what is stored is as wrong however it is read.
    assert changes("kivi", heads, turned, 64)[2] == coarse[2]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(squat_figures.__file__).parent))
    monkeypatch.setattr(sys, "argv", [
        "squat_study.py", "--parts", "figures", "--json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "f.png"), "--lengths", "64",
        "--tail", "8", "--rows", "2",
    ])
    from benchmarks.extensions.squat import squat_study

    assert squat_study.main() == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert len(found["deviations"]["before"]) == 6 and len(found["changes"]["used"][5]["squat"]) == 2
    printed = capsys.readouterr().out
    assert "deviation of decoded queries, after RoPE" in printed and "stored before RoPE, read after it" in printed
    assert (tmp_path / "f.png").stat().st_size > 20_000
