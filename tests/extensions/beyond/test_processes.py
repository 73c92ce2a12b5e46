"""Two processes that learn together end with the tables of one that has all batches."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from e2e_layers import llama
from interpreted import interpreted
from test_learn import EAGER, learned, words

from kvcompile.extensions.beyond.tables import ModelTables

WORLD = 2


def half(rank: int, meeting: str) -> None:
    """One of the processes: learn alone on all, then together with the other on its part of every batch."""
    settings, batches, held_out = dataclasses.replace(EAGER, steps=2), words(2), words(1, seed=9)
    alone = learned(llama(head_dim=32), settings, batches=batches, validation=held_out)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    mine = [batch.chunk(WORLD)[rank] for batch in batches]
    found = learned(llama(head_dim=32), settings, batches=mine, validation=[batch.chunk(WORLD)[rank] for batch in held_out])
    assert [loss for _, loss in found.losses] == pytest.approx([loss for _, loss in alone.losses], abs=1e-5)
    assert [loss for _, loss in found.validations] == pytest.approx([loss for _, loss in alone.validations], abs=1e-5)
    assert isinstance(alone.scheme.tables, ModelTables)
    assert isinstance(found.scheme.tables, ModelTables)
    tables = [table for site in found.scheme.tables.sites.values() for table in (site.key, site.value)]
    wanted = [table for site in alone.scheme.tables.sites.values() for table in (site.key, site.value)]
    for one, other in zip(tables, wanted, strict=True):
        assert torch.allclose(one.levels, other.levels, atol=1e-3)
        theirs = one.levels.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, one.levels), "processes must not drift apart"
    dist.destroy_process_group()


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(interpreted, [half] * WORLD, range(WORLD), [str(tmp_path / "meeting")] * WORLD))
