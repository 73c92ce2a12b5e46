"""``learn``: what moves and what must not, when it ends, what it leaves on disk, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_layers import cache_of, llama

import kvcompile
from kvcompile.errors import BadBatch, BadLearnSetting, BadRun, BadTables, HeadDimNotDivisible, NothingToLearn
from kvcompile.extensions.beyond.learning.learn import Learned, native_loss
from kvcompile.extensions.beyond.learning.loss import NextToken
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.trainer import Trainer
from kvcompile.extensions.beyond.storage import load_tables, read_tables, save_tables
from kvcompile.extensions.beyond.tables import ModelTables, uniform_levels, uniform_thresholds
from kvcompile.schemes import Beyond
from kvcompile.schemes.model_file import fingerprint
from kvcompile.settings import Inner

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

EAGER = LearnSettings(steps=6, batch=4, validate_every=2, rate=5e-3, inner=Inner.EAGER, compared=False)


def words(count: int, rows: int = 4, seed: int = 0) -> list[torch.Tensor]:
    """Batches of random words with a pattern in them, that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.cat([part := torch.randint(1, 64, (rows, 12), generator=generator), part], 1) for _ in range(count)]


def learned(model: Any, settings: LearnSettings = EAGER, scheme: Beyond | None = None, **given: Any) -> Learned:
    """How learning went."""
    found: list[Learned] = []
    given = {"validation": words(2, seed=9), **given}
    kvcompile.learn(model, given.pop("batches", words(8)), scheme or Beyond(2), settings=settings, quiet=True, report=found.append, **given)
    return found[0]


def test_learning_lowers_the_loss_it_learns_on_and_nothing_else_moves() -> None:
    model = llama(head_dim=32)
    model.train()
    model.get_input_embeddings().weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = words(1, rows=8)
    found = learned(model, dataclasses.replace(EAGER, steps=40, batch=8, rate=2e-2), batches=batch * 40, validation=batch)
    assert found.initial is not None and found.best is not None and found.best < found.initial - 1e-3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training and [p.requires_grad for p in model.parameters()].count(False) == 1
    assert isinstance(found.scheme.tables, ModelTables)
    for site in found.scheme.tables.sites.values():
        for table in (site.key, site.value):
            assert (table.thresholds.diff(dim=-1) > 0).all() and not torch.equal(table.levels[0, 0], uniform_levels(2))


def test_first_validation_is_of_plain_asymmetric_quantization() -> None:
    """The initial tables serve as ``beyond()`` does, which equals plain asymmetric codes bit for bit."""
    model = llama(head_dim=32).requires_grad_(False)
    trainer = Trainer(model, Beyond(), EAGER, NextToken(model))
    batch = words(1)
    found = trainer.validate(batch)
    for slot in trainer.parameters.all():
        assert torch.equal(slot.levels[0, 0], uniform_levels(4)) and torch.equal(slot.thresholds[0, 0], uniform_thresholds(4))
    served = torch.compile(model, backend=kvcompile.backend("beyond", inner="eager", strict=True))

    def run(input_ids: torch.Tensor, use_cache: bool) -> Any:
        del use_cache
        return served(input_ids=input_ids, past_key_values=cache_of(model, "dynamic"))

    total, count = NextToken(model)(run, batch[0])
    assert found == pytest.approx(float(total / count), abs=1e-6)


def test_what_is_learned_is_what_is_served_through_a_file_too(tmp_path: Path) -> None:
    model = llama(head_dim=32)
    found = learned(model, dataclasses.replace(EAGER, rate=2e-2))
    save_tables(found.scheme, tmp_path / "t.safetensors")
    loaded = load_tables(tmp_path / "t.safetensors", model)
    assert loaded == found.scheme
    torch._dynamo.reset()
    served = torch.compile(model, backend=kvcompile.backend(loaded, inner="eager", strict=True))

    def run(input_ids: torch.Tensor, use_cache: bool) -> Any:
        del use_cache
        return served(input_ids=input_ids, past_key_values=cache_of(model, "dynamic"))

    assert native_loss(model, words(2, seed=9)) != found.best
    with torch.no_grad():
        losses = [NextToken(model)(run, batch) for batch in words(2, seed=9)]
    assert sum(float(total) for total, _ in losses) / sum(int(count) for _, count in losses) == pytest.approx(found.best, abs=1e-6)


def test_frozen_levels_and_thresholds_leave_the_loss_where_it_was() -> None:
    batch = words(1)
    found = learned(llama(head_dim=32), dataclasses.replace(EAGER, levels=False, thresholds=False), batches=batch * 6)
    assert len({loss for _, loss in found.losses}) == 1 and len(found.losses) == 6
    assert found.initial == found.best == found.validations[-1][1]


@pytest.mark.parametrize(("frozen", "other"), [("levels", "thresholds"), ("thresholds", "levels")])
def test_ablations_move_the_other_half_alone(frozen: str, other: str) -> None:
    # Without validation the last tables are returned.
    found = learned(llama(head_dim=32), dataclasses.replace(EAGER, **{frozen: False}, rate=2e-2), validation=())
    uniform = {"levels": uniform_levels(2), "thresholds": uniform_thresholds(2)}
    assert isinstance(found.scheme.tables, ModelTables)
    tables = [table for site in found.scheme.tables.sites.values() for table in (site.key, site.value)]
    assert all(torch.equal(getattr(table, frozen)[0, 0], uniform[frozen]) for table in tables)
    assert any(not torch.equal(getattr(table, other)[0, 0], uniform[other]) for table in tables)


def test_pieces_of_a_batch_are_the_batch() -> None:
    """Gradients of thresholds are rectified once, of the sum."""
    whole = words(4, rows=4)
    pieces = [part for batch in whole for part in batch.split(1)]
    one, other = (
        learned(llama(head_dim=32), dataclasses.replace(EAGER, steps=4), batches=batches, validation=()) for batches in (whole, pieces)
    )
    assert [step for step, _ in other.losses] == [1, 2, 3, 4]
    for (_, mine), (_, theirs) in zip(one.losses, other.losses, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert isinstance(one.scheme.tables, ModelTables) and isinstance(other.scheme.tables, ModelTables)
    for path, site in one.scheme.tables.sites.items():
        assert torch.allclose(site.key.levels, other.scheme.tables.sites[path].key.levels, atol=1e-3)


def lengths(count: int) -> list[torch.Tensor]:
    """Batches that all have another length."""
    return [torch.randint(1, 64, (4, 8 + at), generator=torch.Generator().manual_seed(at)) for at in range(count)]


def test_more_lengths_than_dynamo_keeps_versions_of_are_learned_from_all_the_same() -> None:
    """Dynamo would run the model as it is from the ninth version on, which is a loss of nothing learned."""
    model, batches = llama(head_dim=32), lengths(11)
    found = learned(model, dataclasses.replace(EAGER, steps=11), batches=batches, validation=batches)
    assert found.steps == 11
    torch._dynamo.reset()
    alone = [Trainer(model, Beyond(2), EAGER, NextToken(model)).validate([batch]) for batch in batches]
    counts = [batch[:, 1:].numel() for batch in batches]
    assert found.initial == pytest.approx(sum(a * b for a, b in zip(alone, counts, strict=True)) / sum(counts), rel=1e-6)


def test_a_batch_that_ran_without_quantizers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.extensions.beyond.learning.trainer.MOST_GRAPHS", 1)
    with pytest.raises(BadBatch, match="all 4 slots quantized, found 4 that were not"):
        learned(llama(head_dim=32), batches=lengths(3))


def test_masked_tokens_teach_nothing() -> None:
    """A chat prefix is context and no target: what stands in it as a target has no part in the loss."""
    model = llama(head_dim=32)
    ids = words(1)[0]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :5] = False
    loss = NextToken(model)
    total, count = loss(model, {"input_ids": ids, "loss_mask": mask})
    logits = model(input_ids=ids).logits[:, 4:-1].flatten(0, 1)
    assert int(count) == 4 * 19
    assert float(total) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, ids[:, 5:].flatten(), reduction="sum")), rel=1e-5)
    with pytest.raises(BadBatch, match="tokens that count in every batch"):
        learned(model, batches=[{"input_ids": ids, "loss_mask": torch.zeros_like(mask)}])


def test_learning_ends_after_rising_validations_and_keeps_the_best() -> None:
    """With a rate that wrecks the tables, validation rises from the first step on: the initial tables are the best."""
    found = learned(llama(head_dim=32), dataclasses.replace(EAGER, steps=100, validate_every=1, rate=0.5), batches=words(60))
    rises = [b > a for (_, a), (_, b) in zip(found.validations, found.validations[1:], strict=False)]
    if found.stopped.startswith("validation rose"):
        assert rises[-3:] == [True] * 3 and not any(rises[at : at + 3] == [True] * 3 for at in range(len(rises) - 3))
    best = min(loss for _, loss in found.validations)
    assert found.best == best and (found.best_step, best) in found.validations
    assert found.stopped.startswith("validation rose 3 times")


def test_an_interrupted_run_keeps_the_best(tmp_path: Path) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield from words(5)
        raise KeyboardInterrupt

    found = learned(llama(head_dim=32), dataclasses.replace(EAGER, steps=100), batches=batches(), run=tmp_path / "run")
    assert found.stopped == "interrupted" and found.steps == 5
    assert read_tables(tmp_path / "run" / "best.safetensors") == found.scheme


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    settings = dataclasses.replace(EAGER, steps=15, patience=50)
    data = words(15)
    whole = learned(llama(head_dim=32), settings, batches=data, run=tmp_path / "whole")

    def broken() -> Iterator[torch.Tensor]:
        yield from data[:12]
        raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        learned(llama(head_dim=32), settings, batches=broken(), run=tmp_path / "run")
    again = learned(llama(head_dim=32), settings, batches=data, run=tmp_path / "run", resume=True)
    assert again.losses == whole.losses and again.validations == whole.validations and again.scheme == whole.scheme
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {"step", "loss", "rate"} <= lines[1].keys() and lines[-1]["stopped"] == whole.stopped


def test_a_run_folder_is_another_runs(tmp_path: Path) -> None:
    learned(llama(head_dim=32), run=tmp_path / "run")
    with pytest.raises(BadRun, match="another run"):
        learned(llama(head_dim=32), run=tmp_path / "run")
    with pytest.raises(BadRun, match="settings"):
        learned(llama(head_dim=32), dataclasses.replace(EAGER, rate=0.01), run=tmp_path / "run", resume=True)
    with pytest.raises(BadRun, match="fingerprint"):
        learned(llama(head_dim=32, seed=1), run=tmp_path / "run", resume=True)
    with pytest.raises(BadRun, match="whole checkpoint"):
        learned(llama(head_dim=32), run=tmp_path / "run", resume=True)
    with pytest.raises(BadRun, match=r"config\.json"):
        learned(llama(head_dim=32), run=tmp_path / "none", resume=True)


def test_a_run_folder_has_pictures_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    learned(llama(head_dim=32), run=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "log.jsonl", "best.safetensors", "loss.png", "levels.png"}


# --- files --------------------------------------------------------------------------------------------


@pytest.fixture(name="file")
def tables_file(tmp_path: Path) -> Path:
    """A file of tables for ``llama(head_dim=32)``."""
    save_tables(learned(llama(head_dim=32), dataclasses.replace(EAGER, steps=1)).scheme, tmp_path / "tables.safetensors")
    return tmp_path / "tables.safetensors"


def test_tables_are_refused_for_another_model(file: Path) -> None:
    load_tables(file, llama(head_dim=32))
    load_tables(file, torch.compile(llama(head_dim=32)))
    load_tables(file, llama(head_dim=32).to(torch.bfloat16))
    for other in (llama(head_dim=32, seed=1), llama(head_dim=32, layers=1), llama(head_dim=16)):
        with pytest.raises(BadTables, match="expected tables for this model"):
            load_tables(file, other)


def test_files_that_are_no_tables_are_refused(file: Path) -> None:
    from safetensors.torch import save_file

    raw = file.read_bytes()
    for content in (raw[: len(raw) // 2], raw[:5], b"", b"\x80\x04 a pickle", raw[:-1]):
        file.write_bytes(content)
        with pytest.raises(BadTables, match="expected a whole file of tables"):
            read_tables(file)
    save_file({"x": torch.zeros(2)}, str(file))
    with pytest.raises(BadTables, match="without that mark"):
        read_tables(file)
    with pytest.raises(BadTables, match="cannot be read"):
        read_tables(file.with_name("none"))


def test_a_file_with_a_table_missing_is_refused(file: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(str(file), "pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, str(file), metadata)
    with pytest.raises(BadTables):
        read_tables(file)
    save_file(tensors, str(file), {**metadata, "scheme": "int4(group=32)"})
    with pytest.raises(BadTables, match="expected tables of the scheme"):
        read_tables(file)


def test_a_fingerprint_sees_values_names_and_shapes() -> None:
    model = llama(head_dim=32)
    assert fingerprint(model) == fingerprint(llama(head_dim=32)) == fingerprint(torch.compile(model))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1
    assert fingerprint(model) != fingerprint(llama(head_dim=32))


# --- refusals -----------------------------------------------------------------------------------------


def test_what_cannot_be_learned_is_refused_with_a_sentence() -> None:
    model = llama(head_dim=32)
    with pytest.raises(NothingToLearn, match="expected an attention whose keys and values a cache would hold"):
        kvcompile.learn(torch.nn.Sequential(torch.nn.Embedding(64, 64)), words(1), settings=EAGER, quiet=True)
    for batches in ([torch.zeros(3)], [{"ids": 1}], [torch.zeros(2, 1, dtype=torch.int64)]):
        with pytest.raises(BadBatch, match="expected token ids"):
            kvcompile.learn(model, batches, settings=EAGER, quiet=True)
    with pytest.raises(BadLearnSetting, match="at least one batch"):
        kvcompile.learn(model, [], settings=EAGER, quiet=True)
    with pytest.raises(BadTables, match="a scheme without tables"):
        kvcompile.learn(model, words(1), Beyond(trained=True), settings=EAGER, quiet=True)
    with pytest.raises(HeadDimNotDivisible, match="found head dim 32 and group 64"):
        kvcompile.learn(model, words(1), Beyond(group=64), settings=EAGER, quiet=True)
    with pytest.raises(BadLearnSetting, match="folder to resume"):
        kvcompile.learn(model, words(1), settings=EAGER, resume=True, quiet=True)
    for wrong in ({"steps": 0}, {"rate": -1.0}, {"window": float("nan")}, {"memory_budget": 2.0}, {"batch": True}):
        with pytest.raises(BadLearnSetting):
            LearnSettings(**wrong)  # type: ignore[arg-type]


def test_the_rate_is_a_cosine() -> None:
    settings = LearnSettings(steps=100)
    assert settings.rate_at(0) == 7e-4 and settings.rate_at(50) == pytest.approx(3.5e-4) and settings.rate_at(100) == pytest.approx(0)
