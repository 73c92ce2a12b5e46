"""The page "Generate": its examples run as they stand, one after the other, on a tiny checkpoint, compiled by Inductor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from installed_metadata import installed

from benchmarks.accept.ten_lines import save_checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "GENERATE.md"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    """The backend by its name is found where the package is installed."""
    with installed(tmp_path / "site"):
        yield


def examples() -> list[str]:
    """Return the page's examples, without ``.cuda()`` where there is no GPU."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found if torch.cuda.is_available() else [source.replace(".cuda()", "") for source in found]


def run(folder: Path, compiled: bool) -> dict[str, Any]:
    """Run all examples in order, with a compiled model or, beside it, with the model as it is; return their names."""
    names: dict[str, Any] = {"path": str(folder), "file": str(folder / "cache.safetensors")}
    changes = {"int4": "dense", "bfloat16": "float32"}
    if not compiled:
        changes["torch.compile(model.forward, backend=backend)"] = "model.forward"
        # An uncompiled model's cache is no file of codes; a copy goes on in its place.
        changes["kvcompile.save_cache(held, file, tokens=prefix, model=model)"] = "loaded = kvcompile.fork(held)"
        changes["loaded = kvcompile.load_cache(file, tokens=prefix, model=model, scheme=backend)\n"] = ""
    for source in examples():
        for old, new in changes.items():
            source = source.replace(old, new)  # noqa: PLW2901 - the changed example
        torch.manual_seed(0)
        exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102 - the page's own example
    return names


@pytest.mark.compile
@pytest.mark.slow
def test_every_example_gives_the_tokens_of_the_uncompiled_model(tmp_path: Path, one_thread: None, fresh_dynamo: None) -> None:
    """By ``dense``, which rounds nothing, so that every token can be compared; the page's own scheme runs below."""
    save_checkpoint(tmp_path)
    theirs, ours = run(tmp_path, compiled=False), run(tmp_path, compiled=True)
    for name in ("first", "second", "grown", "text", "resumed", "sampled", "beams", "drafted"):
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["streamed"] == theirs["streamed"] and len(ours["answers"]) == 2
    assert all(torch.equal(mine, their) for mine, their in zip(ours["answers"], theirs["answers"], strict=True))
    report = ours["backend"].report()
    assert report.sites and not report.refusals


@pytest.mark.compile
@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path: Path, one_thread: None, fresh_dynamo: None) -> None:
    save_checkpoint(tmp_path)
    names: dict[str, Any] = {"path": str(tmp_path), "file": str(tmp_path / "cache.safetensors")}
    for source in examples():
        exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102 - the page's own example
    report = names["backend"].report()
    assert report.sites and not report.refusals
    assert names["text"].shape[1] > 40 and names["streamed"]
