"""``kvcompile calibrate``: from text files to scales that a backend serves, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.extensions.static_scales.scales import ModelScales, ScaleExtent
from kvcompile.tools.cli.main import main
from kvcompile.tools.cli.targets import TargetOptions, resolve

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 40
SMALL = ["--bytes", "--length", "33", "--sequences", "6", "--batch", "3", "--validation", "4", "--dtype", "float32"]


@pytest.fixture(name="data")
def text_file(tmp_path: Path) -> Path:
    """A file of text."""
    (tmp_path / "data.txt").write_text(TEXT)
    return tmp_path / "data.txt"


def test_scales_are_measured_from_a_file_and_fit_the_model(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.with_name("scales.safetensors")
    command = ["calibrate", "examples/tinylm", "--data", str(data), "--out", str(out), *SMALL, "--scheme", "fp8", "--granularity", "head"]
    assert main(command) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "fp8-static" in told and "198 tokens" in told and "clipped" in told
    model = resolve("examples/tinylm", TargetOptions(dtype=torch.bfloat16)).model
    scheme = kvcompile.load_scales(out, model)
    assert isinstance(scheme.scales, ModelScales) and scheme.name == "fp8-static"
    assert {site.key.extent for site in scheme.scales.sites.values()} == {ScaleExtent.HEAD}


@pytest.mark.parametrize(("changed", "found"), [
    (["--percentile", "101"], "percentile to be a number from 50 to 100"), (["--prefix", "chat"], "bytes have no chat template"),
    (["--validation", "400"], "expected more than 400 sequences"),
])
def test_what_cannot_be_done_is_said(data: Path, changed: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.with_name("scales.safetensors")
    assert main(["calibrate", "examples/tinylm", "--data", str(data), "--out", str(out), *SMALL, *changed]) == 2
    assert found in " ".join(capsys.readouterr().err.split()) and not out.exists()
