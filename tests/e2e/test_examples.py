"""Every example of ``examples/`` runs to its end, and what it prints is what its first line promises."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("one_thread", "fresh_dynamo")]

REWRITTEN = r"attentions? rewritten"
CASES = {
    "certified_steps": (["--new", "4"], r"largest bound of the last step: 0\.\d+, model\.layers\."),
    "chat": (["--new", "4"], r"\[\d+ new tokens over [1-9]\d* in the cache"),
    "conversations": (["--turns", "2", "--new", "4"], r"graphs after each turn: \[(\d+), \1\]"),
    "custom_attention": (["--steps", "4"], r"off by 0\.0\d+ of its length"),
    "int4_weights": (["--new", "4"], r"weights: 19,158,016 bytes, now 5,147,944"),
    "layers": (["--quick", "--new", "4"], r"self_attn\*? +\w"),
    "learn_levels": (["--steps", "2", "--batch", "2", "--length", "64", "--new", "4"], r"bytes of tables"),
    "long_document": (["--tokens", "128", "--new", "4"], r"saved: [\d,]+ bytes"),
    "lora": (["--new", "4"], r"without it:"),
}
NEEDS = {"int4_weights": "torchao", "lora": "peft"}
"""Packages that an example needs beside kvcompile's."""


def test_no_example_is_left_out() -> None:
    folder = Path(__file__).parents[2] / "examples"
    assert {path.stem for path in folder.glob("*.py")} == {*CASES, "add_a_scheme", "checkpoint", "demo"}


@pytest.mark.parametrize("name", CASES)
def test_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    arguments, expected = CASES[name]
    importlib.import_module(name).main(arguments)
    out = capsys.readouterr().out
    assert re.search(expected, out), out
    if name not in ("certified_steps", "long_document"):
        assert re.search(REWRITTEN, out), out
