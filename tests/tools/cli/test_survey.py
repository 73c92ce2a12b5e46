"""The survey: its pieces on made-up cases, what happens to an architecture that hangs, and a handful of real ones."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile import schemes
from kvcompile.tools.cli.architectures import WITH_ENCODER, names
from kvcompile.tools.cli.control import rounded
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.shrink import tiny_config
from kvcompile.tools.cli.survey import Survey, conduct, read_cases, untried
from kvcompile.tools.cli.survey_table import about, as_csv, summary, tally, verdict
from kvcompile.tools.cli.trial import DENSE_BOUND, Case, CaseOutcome, TrialSettings

GOOD = Case("good", "static", "sdpa", CaseOutcome.REWRITTEN.value, sites=2, error_dense=3e-7, error_scheme=0.01, graphs=3, stock_graphs=3)
PARTLY = replace(GOOD, architecture="partly", outcome=CaseOutcome.PARTLY.value, refused=("read by | another",), reasons=({"reason": "x"},))
OUTSIDE = Case("ssm", "static", "sdpa", CaseOutcome.NO_CACHE.value, "0 attentions without a cache")
QUICK = TrialSettings(rows=(3,), prompt=6, steps=4, layers=1, compare_stock=False)


def test_an_architecture_is_what_its_worst_case_is() -> None:
    assert verdict([GOOD, replace(GOOD, cache="dynamic", outcome=CaseOutcome.WRONG.value)]) is CaseOutcome.WRONG
    assert verdict([GOOD, replace(OUTSIDE, outcome=CaseOutcome.NOT_RUN.value)]) is CaseOutcome.REWRITTEN
    assert tally([GOOD, PARTLY, OUTSIDE]) == {CaseOutcome.REWRITTEN: 1, CaseOutcome.PARTLY: 1, CaseOutcome.NO_CACHE: 1}


def test_what_is_outside_is_not_counted() -> None:
    assert summary([GOOD, PARTLY, OUTSIDE]).startswith("1 of 2 architectures")
    assert "50.0%" in summary([GOOD, PARTLY, OUTSIDE])


def test_csv_has_a_row_for_each() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv([PARTLY, GOOD, OUTSIDE]))))
    assert [row["architecture"] for row in rows] == ["good", "partly", "ssm"]
    assert list(rows[0].values()) == ["good", "rewritten at every site", "2", "3e-07", "1e-02", "3", "3", ""]
    assert rows[1]["why"] == "read by | another" and rows[2]["graphs"] == rows[2]["stock"] == rows[2]["dense"] == ""


def test_it_says_how_it_was_made() -> None:
    said = about(Survey(("good",), ("static",), ("sdpa",), QUICK))
    assert "caches static, attention sdpa, batch 3" in said and "4 steps" in said and "`int8`" in said


def test_an_architecture_that_takes_too_long_ends_alone() -> None:
    found = list(conduct(Survey(("llama",), ("dynamic", "static"), ("eager",), QUICK, timeout=0.0)))
    assert [case.outcome for case in found[0]] == [CaseOutcome.FAILED.value] * 2
    assert all("not done after" in case.detail for case in found[0])


def test_what_is_known_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "known.json"
    path.write_text(json.dumps([replace(GOOD, architecture="llama").plain()]))
    known = read_cases(path)
    assert [(case.architecture, case.outcome) for case in known] == [("llama", CaseOutcome.REWRITTEN.value)]
    assert untried(("llama", "gpt2"), ("static",), ("sdpa",), known) == ("gpt2",)
    assert untried(("llama",), ("static", "dynamic"), ("sdpa",), known) == ("llama",)
    page = tmp_path / "page.csv"
    assert main([
        "survey", "--archs", "llama", "--caches", "static", "--attention", "sdpa", "--known", str(path), "--csv", str(page),
    ]) == 0
    assert "llama,rewritten at every site,2," in page.read_text() and "Made by `kvcompile survey`" in capsys.readouterr().out
    assert main(["survey", "--known", str(page)]) == 2
    assert "no JSON of an earlier survey" in capsys.readouterr().err


def test_names_are_there_once_and_mark_encoders() -> None:
    found = names()
    assert len(found) == len(set(found)) > 150
    assert {"llama", "gpt2", "bart", "bart" + WITH_ENCODER, "t5" + WITH_ENCODER} <= set(found)


def test_the_control_rounds_what_enters_a_cache() -> None:
    from transformers import DynamicCache

    scheme = schemes.parse("int8")
    x = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(0))
    with rounded(scheme):
        key, value = DynamicCache().update(x, 2 * x, 0)
    assert torch.equal(value, 2 * key) and 0 < (key - x).abs().max() < 0.05
    assert torch.equal(DynamicCache().update(x, x, 0)[0], x)


@pytest.mark.parametrize(("kind", "field", "kept"), [
    ("jamba", "layers_block_type", {"attention", "mamba"}), ("gemma2", "layer_types", {"sliding_attention", "full_attention"}),
])
def test_a_tiny_model_has_every_kind_of_layer(kind: str, field: str, kept: set[str]) -> None:
    from transformers import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING[kind]())
    kinds = {str(item).replace("full_", "").replace("linear_attention", "mamba") for item in getattr(config, field)}
    assert kinds == {item.replace("full_", "") for item in kept}
    assert config.num_hidden_layers <= 4


def test_layers_that_share_keep_a_layer_to_share_with() -> None:
    from transformers import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING["gemma3n_text"](), layers=1)
    shared = config.num_kv_shared_layers
    assert shared and set(config.layer_types[-shared:]) <= set(config.layer_types[:-shared])


@pytest.mark.survey
@pytest.mark.timeout(1800)
def test_a_handful() -> None:
    chosen = ("bloom", "t5" + WITH_ENCODER)
    found = [case for cases in conduct(Survey(chosen, ("dynamic",), ("eager",), QUICK)) for case in cases]
    assert {case.architecture for case in found} == set(chosen)
    for case in found:
        assert case.outcome == CaseOutcome.REWRITTEN.value, case
        assert case.error_dense is not None and case.error_dense <= DENSE_BOUND
        assert case.error_scheme is not None and 0 < case.error_scheme <= QUICK.bound
        json.dumps(case.plain())


def test_the_command_says_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["survey", "--archs", "lama"]) == 2
    assert "did you mean" in capsys.readouterr().err
