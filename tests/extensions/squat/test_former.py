"""Texts and pickles of squat that versions before 0.2 wrote: they keep the values that they had."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from test_squat import WIDTH, correlated

from kvcompile import schemes
from kvcompile.extensions.squat import subspace
from kvcompile.extensions.squat.scheme import Queries, Subspace, Unit
from kvcompile.schemes import Squat, parse
from kvcompile.schemes.rotation import Rotate
from kvcompile.types import Role

FORMER = (
    "squat(bits=3,group=16,window=64,axis=auto,scale_dtype=float16,pre_rope=False,"
    "lam=0.5,rank=7,subblock=16,normalise=True,subspace=row,queries=pre)"
)
"""As ``spec`` wrote it: all options but those of rotation and first tokens that had their defaults."""


def test_texts_written_before_keep_their_values() -> None:
    made = parse(FORMER)
    assert isinstance(made, Squat)
    assert (made.bits, made.lam, made.rank, made.subblock, made.subspace) == (3, 0.5, 7, 16, Subspace.ROW)
    # What those texts left out, or named otherwise, is not what this version has by default.
    assert (made.rotate, made.unit, made.queries, made.guard) == (Rotate.NONE, Unit.QUERIES, Queries.PRE, False)
    assert parse(FORMER[:-1] + ",rotate=kv,sinks=4)") == dataclasses.replace(made, rotate=Rotate.KV, sinks=4)
    unnormalised = parse(FORMER.replace("normalise=True", "normalise=False"))
    assert unnormalised == dataclasses.replace(made, unit=Unit.NONE)
    short = parse("squat(normalise=True)")
    assert short == Squat(rank=20, subblock=32, unit=Unit.QUERIES, queries=Queries.PRE, guard=False, rotate=Rotate.NONE)
    for scheme in (made, unnormalised, short, *Squat.variants(), Squat(pre_rope=True), parse("squat-paper")):
        assert parse(scheme.spec()) == scheme and "rotate=" in scheme.spec(), "no text of this version depends on a default of rotation"


def test_former_defaults_teach_the_plane_that_they_taught() -> None:
    q, made = correlated(80, WIDTH, 20).expand(1, 2, 1, -1, -1), parse("squat(normalise=True)").for_role(Role.KEY)
    weight = subspace.leading(subspace.gram(q.flatten(2, 3)), 20) / 80
    expected = subspace.moves(weight, 32).to(torch.float32)
    told = schemes.Prompt(torch.randn(1, 2, 80, WIDTH))
    assert torch.equal(made.calibrate(q, None, told)[0][0], expected) and expected.any()


@pytest.mark.parametrize("pre_rope", [False, True])
def test_pickles_written_before_keep_their_values(pre_rope: bool, tmp_path: Path) -> None:
    """A pickle holds the options by name; a former one has ``normalise`` and lacks those that came later."""
    former = Squat.__new__(Squat)
    now = vars(Squat(bits=4, pre_rope=pre_rope))
    gone = {"unit", "guard"}
    state = {name: value for name, value in now.items() if name not in gone}
    state |= {"normalise": False, "lam": 1e-3, "rank": 5, "subblock": 64, "rotate": Rotate.NONE, "queries": Queries.PRE}
    former.__dict__.update(state)
    torch.save({"scheme": former}, tmp_path / "former.pt")
    expected = Squat.paper(bits=4, pre_rope=pre_rope)
    assert torch.load(tmp_path / "former.pt")["scheme"] == expected == pickle.loads(pickle.dumps(former))
    present = Squat(bits=4, rank=9)
    torch.save(present, tmp_path / "present.pt")
    assert torch.load(tmp_path / "present.pt") == present == copy.deepcopy(present)
