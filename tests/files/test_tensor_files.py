"""Files of tensors: a checkpoint, tables and scales are read whole and as they were written, or refused by their own error."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learned_tables import llama_paths, random_tables
from safetensors import safe_open
from safetensors.torch import save_file
from static_scales import random_scales

from kvcompile.errors import BadRun, BadScales, BadTables, ResultsUnread, SchemeError, SensitivityUnread
from kvcompile.extensions.beyond.learning.run_folder import Progress, RunFolder
from kvcompile.extensions.beyond.storage import read_tables, save_tables
from kvcompile.extensions.static_scales.storage import FILE, _declared, save_scales
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.planner.sensitivity import Sensitivity
from kvcompile.types import Role

# --- checkpoints of learning --------------------------------------------------------------------------

LEVELS, THRESHOLDS = torch.arange(16.0).repeat(2, 1, 1), torch.arange(15.0).repeat(2, 1, 1) + 0.5
PROGRESS = {"pieces": 1, "validations": [[1, 2.0]], "losses": [[1, 2.0]], "best": 2.0, "best_step": 1, "rises": 0}
STEPS = {"steps": "3", "progress": json.dumps(PROGRESS)}


def trainer() -> Any:
    """A trainer that has met one slot, without an optimizer."""
    slot = types.SimpleNamespace(levels=LEVELS.clone(), thresholds=THRESHOLDS.clone())
    return types.SimpleNamespace(parameters=types.SimpleNamespace(slots={("a", Role.KEY): slot}), adam=None, steps=0, slot=slot)


def folder(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> RunFolder:
    """A run's folder with such a checkpoint."""
    (path / "config.json").write_text('{"seed": 1}')
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(path / "checkpoint.safetensors"), metadata)
    return RunFolder(path, {"seed": 1}, True)


GOOD = {"a.key.levels": LEVELS + 0.25, "a.key.thresholds": THRESHOLDS}


def test_a_whole_checkpoint_is_read(tmp_path: Path) -> None:
    found = trainer()
    progress = folder(tmp_path, GOOD, STEPS).load(found)
    assert found.steps == 3 and torch.equal(found.slot.levels, LEVELS + 0.25)
    assert progress == Progress(1, [(1, 2.0)], [(1, 2.0)], 2.0, 1, 0)


@pytest.mark.parametrize("change", [
    {"a.key.levels": torch.full((1,), 7.0)}, {"a.key.levels": torch.arange(16.0)}, {"a.key.levels": LEVELS * float("nan")},
    {"a.key.levels": LEVELS.long()}, {"a.key.levels": LEVELS.double()}, {"a.key.thresholds": THRESHOLDS.flip(-1)},
    {"a.key.thresholds": THRESHOLDS * float("inf")}, {"b.key.levels": LEVELS}, {"adam.a.key.levels.step": torch.ones(())},
    {f"adam.a.key.levels.{key}": value for key, value in (("step", torch.ones(())), ("exp_avg", LEVELS), ("exp_avg_sq", -LEVELS - 1))},
    {f"adam.a.key.levels.{key}": value for key, value in (("step", torch.ones(1)), ("exp_avg", LEVELS), ("exp_avg_sq", LEVELS))},
], ids=lambda change: next(iter(change)))
def test_tensors_of_another_run_are_refused(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    found = trainer()
    with pytest.raises(BadRun, match=r"whole checkpoint\.safetensors"):
        folder(tmp_path, {**GOOD, **change}, STEPS).load(found)
    assert found.steps == 0 and torch.equal(found.slot.levels, LEVELS)


@pytest.mark.parametrize("metadata", [
    None, {"progress": STEPS["progress"]}, {**STEPS, "steps": "-5"}, {**STEPS, "steps": "3.5"}, {**STEPS, "steps": "three"}, {"steps": "3"},
    *({**STEPS, "progress": text} for text in ("{}", "[]", "null", "7", "[" * 100_000)),
    *({**STEPS, "progress": json.dumps({**PROGRESS, **change})} for change in (
        {"x": 1}, {"losses": [["a", "b"]]}, {"losses": [[1, None]]}, {"best": "low"}, {"best": float("nan")}, {"best_step": -1},
        {"rises": True},
    )),
])
def test_progress_that_is_none_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    found = trainer()
    with pytest.raises(BadRun, match=r"whole checkpoint\.safetensors"):
        folder(tmp_path, GOOD, metadata).load(found)
    assert found.steps == 0 and torch.equal(found.slot.levels, LEVELS)


@pytest.mark.parametrize("content", ["[]", "1", '"x"', "null", "{", "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadRun, match=r"config\.json"):
        RunFolder(tmp_path, {"seed": 1}, True)


# --- tables and scales --------------------------------------------------------------------------------

PATHS = llama_paths(2)


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None], keep_digest: bool) -> None:
    """Write a file again with a change, by somebody who knows the format; without its digest as files of before have none."""
    with safe_open(str(path), "pt") as opened:
        metadata, tensors = dict(opened.metadata()), {name: opened.get_tensor(name) for name in list(opened.keys())}
    change(tensors, metadata)
    if not keep_digest:
        metadata.pop("digest", None)
    save_file(tensors, str(path), metadata)


def tables(path: Path) -> tuple[type[SchemeError], Callable[[], Any]]:
    """A file of tables, its error and its reader."""
    save_tables(random_tables(PATHS), path)
    return BadTables, lambda: read_tables(path)


def scales(path: Path) -> tuple[type[SchemeError], Callable[[], Any]]:
    """A file of static scales, its error and its reader."""
    save_scales(random_scales(PATHS), path)
    return BadScales, lambda: FILE.read(path, _declared)


def first(tensors: dict[str, torch.Tensor]) -> str:
    """Return the first name of a tensor."""
    return min(tensors)


CHANGES: dict[str, Callable[[dict[str, torch.Tensor], dict[str, str]], None]] = {
    "times 1e38": lambda tensors, _: tensors.update({name: plane * 1e38 for name, plane in tensors.items() if "threshold" not in name}),
    "NaN": lambda tensors, _: tensors.update({first(tensors): tensors[first(tensors)] * float("nan")}),
    "subnormal": lambda tensors, _: tensors.update({name: plane * 0 + 1e-45 for name, plane in tensors.items() if "levels" not in name}),
    "another dtype": lambda tensors, _: tensors.update({first(tensors): tensors[first(tensors)].double()}),
    "another name": lambda tensors, _: tensors.update({"more": torch.ones(1)}),
    "a tensor less": lambda tensors, _: tensors.__delitem__(first(tensors)),
    "no sites": lambda tensors, metadata: (tensors.clear(), tensors.update({"x": torch.ones(1)}), metadata.update(sites="[]"))[0],
    "sites twice": lambda _, metadata: metadata.update(sites=json.dumps([PATHS[0], PATHS[0], PATHS[1]])),
    "sites no list": lambda _, metadata: metadata.update(sites='{"a": 1}'),
    "sites deep": lambda _, metadata: metadata.update(sites="[" * 100_000),
    "no fingerprint": lambda _, metadata: metadata.__delitem__("fingerprint"),
}


@pytest.mark.parametrize("keep_digest", [True, False], ids=["digest", "older"])
@pytest.mark.parametrize("kind", [tables, scales])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_were_changed_are_refused(tmp_path: Path, kind: Any, change: str, keep_digest: bool) -> None:
    if change == "subnormal" and kind is tables and not keep_digest:
        pytest.skip("thresholds that are all one small number are in order, and learning may reach them")
    error, read = kind(tmp_path / "file.safetensors")
    read()
    rewritten(tmp_path / "file.safetensors", lambda tensors, metadata: None, keep_digest)
    read()
    rewritten(tmp_path / "file.safetensors", CHANGES[change], keep_digest)
    with pytest.raises(error):
        read()


@pytest.mark.parametrize("text", [
    "beyond(bits=4,group=64,scale_dtype=float16,trained=True)", "beyond(bits=3,group=32,scale_dtype=float16,trained=True)",
    "beyond(bits=4,group=32,scale_dtype=load,trained=True)", "beyond(bits=99,group=32,scale_dtype=float16,trained=True)", "beyond", "",
])
def test_tables_under_another_schemes_text_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.safetensors"
    tables(path)
    rewritten(path, lambda _, metadata: metadata.update(scheme=text), True)
    with pytest.raises(BadTables):
        read_tables(path)


# --- JSON of measurements -----------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"format": 1}', "[" * 100_000, '{"format": 1, "format": 1}'])
@pytest.mark.parametrize(("read", "error"), [(Results.load, ResultsUnread), (Sensitivity.load, SensitivityUnread)])
def test_measurements_that_are_none_are_refused(tmp_path: Path, read: Any, error: type[Exception], content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(error, match=r"x\.json"):
        read(tmp_path / "x.json")


def test_progress_goes_through_json() -> None:
    progress = Progress(3, [(1, 0.5)], [(1, 0.25), (2, 0.125)], 0.5, 1, 2)
    from kvcompile.files.json_file import parsed

    assert parsed(json.dumps(dataclasses.asdict(progress)), Progress) == progress
