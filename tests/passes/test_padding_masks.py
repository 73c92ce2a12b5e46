"""Masks as the search for a row's first token reads them: every kind of mask term shows the same tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter
from kvcompile.passes.match.sites import MaskKind, MaskTerm
from kvcompile.passes.rewrite.left_padding import shown

SEEN = torch.tensor([[True, True, True, True], [False, False, True, True]])
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(("kind", "mask"), [
    (MaskKind.BOOL, SEEN), (MaskKind.BOOL, SEEN.long() * 3), (MaskKind.FILL, ~SEEN), (MaskKind.FILL, (~SEEN).int()),
    (MaskKind.ADD, torch.where(SEEN, 0.0, -math.inf)), (MaskKind.ADD, torch.where(SEEN, -7.5, LOWEST)),
    (MaskKind.ADD, torch.where(SEEN, math.nan, -math.inf)),
], ids=["booleans", "counts", "filled where true", "filled where not zero", "added", "added with a bias", "added with NaN"])
def test_every_kind_of_mask_shows_the_same_tokens(kind: MaskKind, mask: torch.Tensor) -> None:
    graph = fx.Graph()
    given, q = graph.placeholder("mask"), graph.placeholder("q")
    given.meta["val"], q.meta["val"] = mask[:, None, None], torch.empty(2, 4, 1, 8)
    output = graph.output(given)
    attention = SimpleNamespace(q=q, q_roles=("B", "H", "S", "D"), folded=1)
    site: Any = SimpleNamespace(attention=attention, heads=4, groups=1)
    term = MaskTerm(given, kind, ("B", "", "", "T"))
    output.args = (shown(Emitter(graph, output, lambda size: size, {given: given}), term, site),)
    found = fx.GraphModule({}, graph)(given.meta["val"], q.meta["val"])
    assert found.dtype is torch.bool and torch.equal(found.reshape(2, 4), SEEN)
