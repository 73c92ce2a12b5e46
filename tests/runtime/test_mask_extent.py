"""Masks that show places behind the newest token: of the first call, of later ones, of caches longer than their stores' room."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.passes.match.sites import Limit, LimitKind
from kvcompile.runtime.forms.mask_extent import MaskExtent
from kvcompile.runtime.forms.positions import by_row

HEADS, DIM, CAPACITY = 4, 16, 320
Tensor = torch.Tensor


class Static(nn.Module):
    """A cache of fixed length, with a mask as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, HEADS, CAPACITY, DIM))

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)


@pytest.mark.parametrize(("limit", "places", "end"), [
    (Limit(LimitKind.NODE), 40, 6), (Limit(LimitKind.NODE, -2), 40, 4), (Limit(LimitKind.NODE), 5, 5), (Limit(LimitKind.CONST, 7), 40, 8),
    (Limit(LimitKind.OWN, 2), 40, 5), (Limit(LimitKind.ALL), 40, 40),
], ids=str)
def test_where_the_last_query_of_a_limit_stops_seeing(limit: Limit, places: int, end: int) -> None:
    """Queries at positions 3, 4 and 5, the last of which sees the most places, and no more than there are."""
    graph = fx.Graph()
    pos, q, k = (graph.placeholder(name) for name in ("pos", "q", "k"))
    q.meta["val"], k.meta["val"] = torch.empty(2, HEADS, 3, DIM), torch.empty(2, HEADS, places, DIM)
    attention = SimpleNamespace(q=q, q_roles=("B", "H", "S", "D"), k=k, k_roles=("B", "H", "T", "D"), folded=1)
    limit = replace(limit, node=pos) if limit.kind is LimitKind.NODE else limit
    site: Any = SimpleNamespace(attention=attention, bounds=SimpleNamespace(hi=limit, lo=None, keep=None, carried=()))
    call: Any = SimpleNamespace(read=int, positions=lambda: SimpleNamespace(values={pos: torch.tensor([[3, 4, 5]])}))
    assert object.__new__(MaskExtent)._site(site, call) == end


@pytest.mark.parametrize(("roles", "shape"), [
    (("B", "", "S", "T"), (2, 1, 3, 8)), (("BH", "S", "T"), (2 * HEADS, 3, 8)), (("HB", "S", "T"), (HEADS * 2, 3, 8)), (("T", "B"), (8, 2)),
    (("S", "T"), (3, 8)), (("T",), (8,)),
], ids=str)
def test_which_tokens_each_row_is_shown(roles: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Row 0 sees five tokens in its last head and query, row 1 three; without a dim of rows all see what one does."""
    rows = torch.zeros(2, HEADS, 3, 8, dtype=torch.bool)
    rows[0, -1, -1, 4] = rows[1, -1, -1, 2] = True
    made = {
        ("B", "", "S", "T"): rows.any(1, keepdim=True), ("BH", "S", "T"): rows.flatten(0, 1),
        ("HB", "S", "T"): rows.transpose(0, 1).flatten(0, 1),
        ("T", "B"): rows.any(1).any(1).t(), ("S", "T"): rows.any(0).any(0), ("T",): rows.any(0).any(0).any(0),
    }[roles]
    assert made.shape == shape
    seen = by_row(made, roles, 2)
    assert [row.nonzero().flatten().tolist() for row in seen] == ([[4], [2]] if any("B" in role for role in roles) else [[2, 4]])


class Ragged(Static):
    """Rows at positions of their own, and a mask that shows each the tokens of all up to the furthest."""

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        rows = torch.arange(2)[:, None]
        self.k[rows, :, pos] = k.transpose(1, 2)
        self.v[rows, :, pos] = v.transpose(1, 2)
        seen = (torch.arange(CAPACITY) <= (pos.max() if mask is None else mask)).expand(2, 1, x.shape[1], -1)
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=seen)


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
@pytest.mark.parametrize("scheme", ["kivi(group=16,window=32)", "certified"])
@pytest.mark.parametrize("given", [False, True], ids=["by position", "by a mask argument"])
def test_a_mask_may_show_a_row_more_than_it_holds(given: bool, scheme: str) -> None:
    """Row 1 goes back by two tokens, which the mask still shows: no window holds them, so the dense cache serves the call."""
    torch.manual_seed(0)
    model, backend = Ragged(), kvcompile.backend(scheme, inner="eager")
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    with torch.no_grad():
        for first in ((0, 0), (5, 3), (6, 4)):
            count = 5 if first == (0, 0) else 1
            x, pos = torch.randn(2, count, HEADS * DIM), torch.tensor(first)[:, None] + torch.arange(count)
            mask = pos.max().expand(2, 1, 1, 1).clone() if given else None
            torch.testing.assert_close(compiled(x, pos, mask), model(x, pos, mask))
    assert backend.report().sites and "tokens of row 1 after a write at positions 3 to 3" in str(backend.report())


class Counted(Static):
    """The positions come from a counter of its own; so does the mask where none is given: nobody looks at a later call's on the host.

    ``leap``: the position whose query sees 300 places more.
    """

    def __init__(self, leap: int = -1) -> None:
        super().__init__()
        self.leap = leap
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
        pos = self.counter + torch.arange(x.shape[1])
        mask = torch.arange(CAPACITY) <= torch.where(pos == self.leap, pos + 300, pos)[:, None] if mask is None else mask
        out = super().forward(x, pos, mask)
        self.counter.add_(x.shape[1])
        return out


class Growing(nn.Module):
    """A concatenated cache whose mask compares places with positions that are an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: Tensor, pos: Tensor, past: tuple[Tensor, Tensor] | None) -> Any:
        q, k, v = self.p(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= pos[:, None]), (k, v)


def bias(pos: Tensor) -> Tensor:
    """A bias that hides nothing."""
    return torch.linspace(0, 1, CAPACITY).expand(1, 1, len(pos), CAPACITY).clone()


def ahead(pos: Tensor) -> Tensor:
    """Places up to 300 behind each query's own, more than the least pages of a store."""
    return (torch.arange(CAPACITY) <= pos[:, None] + 300)[None, None]


def causal(pos: Tensor) -> Tensor:
    """Nothing behind each query's own place."""
    return (torch.arange(CAPACITY) <= pos[:, None])[None, None]


def calls(counts: tuple[int, ...] = (5, 1, 3)) -> list[tuple[Tensor, Tensor]]:
    """New tokens and their positions."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [(torch.randn(2, count, HEADS * DIM), torch.arange(start, start + count)) for start, count in zip(starts, counts, strict=True)]


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize(("scheme", "allowed"), [("dense", 1e-5), ("int8", 2e-2), ("kivi(group=16,window=32)", 1e-5)])
@pytest.mark.parametrize("mask", [bias, ahead])
def test_places_without_a_token_count_as_zeros(mask: Any, scheme: str, allowed: float, inner: str) -> None:
    """They were left out of the softmax. A scheme with a window leaves such a cache dense."""
    if inner == "inductor" and (scheme != "dense" or mask is bias):
        pytest.skip("one compilation is enough")
    torch.manual_seed(0)
    model, backend = Static(), kvcompile.backend(scheme, inner=inner)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    with torch.no_grad():
        for x, pos in calls():
            expected, found = model(x, pos, mask(pos)), compiled(x, pos, mask(pos))
            assert float((expected - found).abs().max()) <= allowed * float(expected.abs().max())
    assert backend.report().sites and not backend.report().refusals


COUNTED_SCHEMES = [("dense", 1e-5), ("int8", 2e-2), ("kivi(group=16,window=32)", 0.2), ("certified", 5e-2)]


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
@pytest.mark.parametrize(("scheme", "allowed"), COUNTED_SCHEMES)
def test_a_mask_argument_is_looked_at_whoever_counts_the_positions(scheme: str, allowed: float) -> None:
    """A mask of one later call shows places far behind the newest token; nothing but that argument says so."""
    torch.manual_seed(0)
    model = Counted()
    compiled = torch.compile(copy.deepcopy(model), backend=kvcompile.backend(scheme, inner="eager"))
    with torch.no_grad():
        for number, (x, pos) in enumerate(calls((5, 1, 1, 1, 1))):
            mask = ahead(pos) if number == 3 else causal(pos)
            expected, found = model(x, pos, mask), compiled(x, pos, mask)
            assert float((expected - found).abs().max()) <= allowed * float(expected.abs().max())


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
@pytest.mark.parametrize(("scheme", "allowed"), COUNTED_SCHEMES)
def test_what_no_host_looks_at_is_nan_where_the_store_ends(scheme: str, allowed: float) -> None:
    """Right within the room of the store, NaN behind it, and right again; validation does not try the leap's position."""
    torch.manual_seed(0)
    model = Counted(leap=22)
    compiled = torch.compile(copy.deepcopy(model), backend=kvcompile.backend(scheme, inner="eager"))
    with torch.no_grad():
        for number, (x, pos) in enumerate(calls((20, 1, 1, 1, 1))):
            expected, found = model(x, pos, None), compiled(x, pos, None)
            if number == 3:
                assert bool(found.isnan().all())
            else:
                assert float((expected - found).abs().max()) <= allowed * float(expected.abs().max())


@pytest.mark.usefixtures("fresh_dynamo", "one_thread")
@pytest.mark.parametrize("offset", [0, 2, -1])
def test_a_new_cache_is_masked_by_the_positions_that_are_given(offset: int) -> None:
    """The first call took them to be 0, 1, 2, ... Where they are not it is served as it was captured, and its cache adopted by the next."""
    torch.manual_seed(0)
    model, backend = Growing(), kvcompile.backend("dense", inner="eager")
    compiled, theirs, ours = torch.compile(model, backend=backend), None, None
    with torch.no_grad():
        for x, pos in calls():
            (expected, theirs), (found, ours) = model(x, pos + offset, theirs), compiled(x, pos + offset, ours)
            torch.testing.assert_close(found, expected)
    assert isinstance(ours[0], kvcompile.CompressedCache)
