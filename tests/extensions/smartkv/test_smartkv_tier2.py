"""smartkv with originals kept: promotions, their codes, the budget beside tier 2, and what callers do with such caches."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_smartkv_cache import CAPACITY, B, D, H, K, Run
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompile.errors import BadOption
from kvcompile.extensions.smartkv import buckets, codes, moves, originals
from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.extensions.smartkv.scheme import OptionalTier2, Smartkv
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.schemes import parse
from kvcompile.tools.planner.stores import StoragePurpose
from kvcompile.tools.planner.stores import StoredSlot as Planned
from kvcompile.types import Role, SlotSpec, pages_for

DRIFT = "tau=1e-6"
"""Widths are decided anew every 32 steps."""


@pytest.fixture(autouse=True)
def _quick(one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    """Small tensors on one thread, nothing compiled before."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def kept(options: str = DRIFT, **given: Any) -> Run:
    """A run that keeps originals."""
    return Run(f"{options},tier2=device", **given)


def beside(run: Run) -> int:
    """Bytes of originals, as their memory says."""
    names = {buckets.ENTERED, buckets.ORIGINALS}
    return sum(plane.untyped_storage().nbytes() for store in run.stores for plane, spec in store.described() if spec.name in names)


def made(run: Run) -> list[torch.Tensor]:
    """Keys and values of all tokens so far, as the steps made them, [B, K, T, D] each."""
    return [torch.cat(parts, 2)[:, :, : run.at] for parts in zip(*run.made, strict=True)]


def assert_codes_are_those_of_originals(stores: tuple[AdaptiveStore, AdaptiveStore], tokens: list[torch.Tensor]) -> set[int]:
    """Every stored token has the codes that its original has at its width, whatever it had before; returns the widths of keys."""
    found = set()
    for store, x in zip(stores, tokens, strict=True):
        half = Buckets.of(tuple(store.planes), store.scheme.form)  # type: ignore[attr-defined]
        seen = torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64)
        for part in half.parts:
            values = x[part.row][:, part.position]
            if half.form.keys and part.bits < 8:
                assert half.mean is not None
                values = codes.turned(values - half.mean[0, part.row].float())
            words, scales = codes.encode(values, part.bits)
            mine = part.coded()
            assert torch.equal(mine[0], words) and torch.equal(mine[1], scales), part.bits
            seen[part.row, part.position] += 1
            found |= {part.bits} if half.form.keys and len(part.position) else set()
        at = torch.arange(store.first, x.shape[2])
        number = at - store.first
        for plane, rows in zip(half.entering, codes.encode(x[:, :, store.first :], 8), strict=True):
            assert torch.equal(plane[number // 64, :, :, number % 64], rows.permute(2, 0, 1, 3))
        assert (seen[:, : store.first] == 1).all() and not seen[:, store.first :].any()
    return found


# --- promotions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    f"{DRIFT},budget=0.5,checks=1,moved=0.02", f"{DRIFT},budget=0.5,keys=4/8,values=2/4,checks=1,moved=0.02",
    f"{DRIFT},budget=0.5,frame=source,keys=2/4",
])
def test_tokens_become_wider_and_have_the_codes_of_their_originals(options: str) -> None:
    run, plain = Run(f"{options},tier2=host"), Run(options)
    for each in (run, plain):
        each.step(300)
    wider = 0
    for _ in range(110):
        before, held = run.widths(), run.stores[0].first
        for each in (run, plain):
            each.step()
        if run.stores[0].first != held:
            pairs = zip(before, run.widths(), strict=True)
            wider += int(torch.stack([new[:, : old.shape[1]] > old for old, new in pairs]).any(0).sum())
            # Not only what grew was read.
            if "source" not in options:
                assert_codes_are_those_of_originals(run.stores, made(run))
    churn = run.stores[0].churn
    assert churn.promoted == wider > 20 and churn.refused == 0 and churn.moved > churn.promoted
    assert plain.stores[0].churn.promoted == 0 and plain.stores[0].churn.refused > 0


def nudged(run: Run, tokens: slice) -> None:
    """Have attention look at nothing but some tokens of the first row, until widths have been decided again."""
    plane, first = run.stores[0].plane("importance"), run.stores[0].first
    assert plane is not None
    while run.stores[0].first == first:
        # [N, B, 1, page, 2]: of position t page t // 64.
        by_position = plane[:, 0, 0].flatten(0, 1)
        by_position[tokens] = 50.0
        plane[:, 0, 0] = by_position.unflatten(0, (-1, 64))
        run.step()
        plane = run.stores[0].plane("importance")
        assert plane is not None


def test_a_token_of_three_bits_that_is_promoted_to_eight_is_as_if_it_always_had_eight() -> None:
    options = f"{DRIFT},budget=0.4,checks=1,moved=0.0,recency=0"
    run, plain = kept(options), Run(options)
    for each in (run, plain):
        each.step(300)
    least = [bits[0, 20:40].clone() for bits in run.widths()]
    assert (least[0] == 3).any() and (least[1] <= 3).any()
    other_row = run.widths()[0][1, 20:40].clone()
    before = [plain.widths(), plain.stores[0].churn]
    for each in (run, plain):
        nudged(each, slice(20, 40))
    keys, values = run.widths()
    assert (keys[0, 20:40] == 8).all() and (values[0, 20:40] == 8).all()
    # A row has its own importance, and its own promotions.
    assert not torch.equal(keys[1, 20:40], keys[0, 20:40]) and (keys[1, 20:40] < 8).any() and other_row.shape == (20,)
    for store, x in zip(run.stores, made(run), strict=True):
        half = Buckets.of(tuple(store.planes), store.scheme.form)  # type: ignore[attr-defined]
        (part,) = [each for each in half.parts if each.row == 0 and each.level == len(half.widths) - 1]
        for token in range(20, 40):
            (at,) = (part.position == token).nonzero().flatten().tolist()
            words, scales = codes.encode(x[0, :, token], 8)
            assert torch.equal(part.coded()[0][:, at], words) and torch.equal(part.coded()[1][:, at], scales)
    assert run.stores[0].churn.promoted >= 20
    # Without originals the very same is refused, and counted.
    for old, new in zip(before[0], plain.widths(), strict=True):  # type: ignore[call-overload]
        assert (new[0, 20:40] <= old[0, 20:40]).all()
    assert plain.stores[0].churn.refused - before[1].refused >= 20 and plain.stores[0].churn.promoted == 0  # type: ignore[attr-defined]


def test_attention_reads_what_was_promoted() -> None:
    run = kept(f"{DRIFT},budget=0.5,checks=1,moved=0.02")
    run.step(300)
    for _ in range(70):
        run.step()
    assert run.stores[0].churn.promoted > 0
    first = run.stores[0].first
    k, v = (store.values(0, pages_for(run.at))[:, :, : run.at] for store in run.stores)
    out = run.step()
    assert run.stores[0].first == first
    new = [codes.decode(codes.encode(x[:, :, -1:], 8), 8) for x in made(run)]
    with torch.no_grad():
        q = run.layer.qkv(run.x[:, run.at - 1 : run.at]).unflatten(-1, (-1, D)).transpose(1, 2)[:, :H]
    assert torch.allclose(out, sdpa(q * 2, torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2), enable_gqa=True), atol=1e-5)


@pytest.mark.parametrize("page", [True, False])
def test_coding_again_asks_the_device_for_no_number(page: bool) -> None:
    """Tier 2 adds no wait for the device to a move: the host knows by then how many tokens are coded again."""

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name()
            assert not any(what in name for what in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
            return func(*args, **(kwargs or {}))

    run = kept("tau=1e9,drift=1.0", capacity=400)
    run.step(256 if page else 290)
    for _ in range(12):
        run.step()
    keys, _ = run.stores
    half = Buckets.of(tuple(keys.planes), keys.scheme.form)  # type: ignore[attr-defined]
    count, number = run.at, len(half.widths)
    wanted = torch.randint(0, number, (B, count), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    before, order = buckets.levels(half, count), moves.order_of(wanted, half)
    counts = originals.counted(originals.changed(half.widths, before, wanted), wanted, number)
    again = originals.again(half.widths, before, wanted, tuple(map(tuple, counts.tolist())))
    into = buckets.made(half, order.ends, torch.full_like(half.first, count), buckets.PlaneLengths.of(order.counts, half))
    moves.EagerMoves().move(half, moves.TokenMove(order.levels, order.place, order.ends, order.counts, again), int(half.first), into)
    keys.keep(count)
    half = Buckets.of(tuple(keys.planes), keys.scheme.form)  # type: ignore[attr-defined]
    first = int(half.first)
    with Asked():
        originals.settle(half, first, count)
        originals.code_again(half, again, order.place, into, order.counts)
    x = made(run)[0]
    for part in into.parts:
        values = x[part.row][:, part.position]
        assert half.mean is not None
        values = values if part.bits == 8 else codes.turned(values - half.mean[0, part.row].float())
        assert torch.equal(part.coded()[0], codes.encode(values, part.bits)[0])
        assert torch.equal(part.position.sort().values, (wanted[part.row] == part.level).nonzero().flatten())


# --- bytes -------------------------------------------------------------------------------------------


def test_the_budget_is_of_what_attention_reads_and_the_report_tells_both() -> None:
    run = kept(f"{DRIFT},budget=0.4")
    run.step(500)
    share = []
    for _ in range(140):
        run.step()
        dense = run.at * B * 2 * K * D * 2
        share.append((run.nbytes - beside(run)) / (0.4 * dense))
        # Float32 tokens, of which up to a 16th more have room, and a page or two that enter.
        assert dense * 2 <= beside(run) <= dense * 2 * (1 + 1 / 16) + 3 * 64 * B * 2 * K * D * 4
    assert max(share) <= 1 and max(share) >= 0.98
    report = run.backend.report()
    assert report.allocated == run.nbytes and report.originals == beside(run) == sum(store.original_nbytes for store in run.stores)
    assert report.hosted == 0, "a CPU has no other memory"
    assert report.announced == 2 * (int(0.4 * run.at * B * K * D * 2) + run.at * B * K * D * 4)
    text = " ".join(str(report).split())
    assert "of that are full-precision copies, which steps do not read; the rest is" in text
    assert f"{report.churn.promoted} of them promotions, 0 promotions refused" in text and report.churn.promoted > 0


def test_options_and_what_is_announced() -> None:
    assert Smartkv().spec() == parse("smartkv(tier2=off)").spec() and "tier2" not in Smartkv().spec()
    for where in (OptionalTier2.DEVICE, OptionalTier2.HOST):
        scheme = parse(f"smartkv(tier2={where.value})")
        assert scheme == Smartkv(tier2=where) == parse(scheme.spec())
    with pytest.raises(BadOption):
        parse("smartkv(tier2=disk)")
    spec = SlotSpec(K, D, torch.bfloat16, Role.KEY)
    assert Smartkv(tier2=OptionalTier2.HOST).bits_per_value(spec) == 16 * 1.4 and Smartkv().bits_per_value(spec) == 16 * 0.4
    hosted = {plane.name for plane in Smartkv(tier2=OptionalTier2.HOST).layout(spec).planes if plane.host}
    assert hosted == {"originals"} and not any(plane.host for plane in Smartkv(tier2=OptionalTier2.DEVICE).layout(spec).planes)
    assert Smartkv().layout(spec).encoded == 2 and Smartkv(tier2=OptionalTier2.DEVICE).layout(spec).encoded == 3


def test_a_plan_counts_originals_apart() -> None:
    spec = SlotSpec(K, D, torch.bfloat16, Role.KEY)
    for where, host in ((OptionalTier2.DEVICE, False), (OptionalTier2.HOST, True)):
        scheme = Smartkv(tier2=where)
        stored = SimpleNamespace(scheme=scheme, slot=spec, layout=scheme.layout(spec), pooled=False, end=None, once=None)
        shares = {share: (on_host, count) for share, on_host, count in Planned.shares(stored, 3, 1000)}  # type: ignore[arg-type]
        assert shares[StoragePurpose.TIER2] == (host, 3 * 1000 * K * D * 2)
        assert shares[StoragePurpose.CODES] == (False, int(0.4 * 3 * 1000 * K * D * 2))
        assert Planned.bytes_per_token(stored, 1000) == pytest.approx(1.4 * K * D * 2)  # type: ignore[arg-type]


# --- what callers do -----------------------------------------------------------------------------------


def test_growing_and_promoting_compile_nothing() -> None:
    run = kept(f"{DRIFT},budget=0.5,checks=1,moved=0.02")
    run.step(200)
    run.step()
    graphs = len(run.backend.graphs)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(150):
        run.step()
    assert run.stores[0].churn.promoted > 0
    assert len(run.backend.graphs) == graphs and torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted


@pytest.mark.parametrize("back", [3, 60, 200, 239])
def test_going_back_and_on_with_other_tokens(back: int) -> None:
    run = kept()
    run.step(200)
    for _ in range(40):
        run.step()
    run.at = 240 - back
    tokens = made(run)
    run.made = [(tokens[0], tokens[1])]
    run.x = run.x.clone()
    run.x[:, run.at :] = torch.randn(B, CAPACITY - run.at, 32, generator=torch.Generator().manual_seed(77))
    run.step(250)
    for _ in range(40):
        run.step()
    assert run.stores[0].first > 480 - back
    assert len(assert_codes_are_those_of_originals(run.stores, made(run))) > 1


def test_reset_begins_anew() -> None:
    run = kept()
    first = [run.step(200), *(run.step() for _ in range(40))]
    for cache in (run.layer.keys, run.layer.values):
        cache.zero_()
    assert run.nbytes < 800 and beside(run) == 0
    run.at, run.made = 0, []
    again = [run.step(200), *(run.step() for _ in range(40))]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_codes_are_those_of_originals(run.stores, made(run))


def test_pickles_and_copies_go_on_alike() -> None:
    run = kept()
    run.step(200)
    for _ in range(20):
        run.step()
    saved = io.BytesIO()
    torch.save([run.layer.keys, run.layer.values], saved)
    saved.seek(0)
    copies = [copy.deepcopy([run.layer.keys, run.layer.values]), torch.load(saved, weights_only=False)]
    copies.append([run.layer.keys.clone(), run.layer.values.clone()])
    at, before = run.at, list(run.made)
    wanted = [run.step() for _ in range(60)]
    promoted = run.stores[0].churn.promoted
    for keys, values in copies:
        run.layer.keys, run.layer.values, run.at, run.made = keys, values, at, list(before)
        assert all(torch.equal(run.step(), want) for want in wanted)
        assert_codes_are_those_of_originals(run.stores, made(run))
    assert promoted > 0


def test_rows_are_taken_with_their_originals() -> None:
    run = kept()
    run.step(200)
    for _ in range(40):
        run.step()
    rows = torch.tensor([1, 0, 1])
    stores = tuple(store.select_rows(rows) for store in run.stores)
    tokens = [x.index_select(0, rows) for x in made(run)]
    assert_codes_are_those_of_originals(stores, tokens)  # type: ignore[arg-type]
    for store, x in zip(stores, tokens, strict=True):
        plane = store.plane(buckets.ORIGINALS)
        assert plane is not None
        assert torch.equal(plane.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : store.first], x[:, :, : store.first])


def test_tokens_written_outside_of_compiled_code_are_kept_too() -> None:
    run = kept()
    run.step(300)
    run.at = 310
    with torch.no_grad():
        _, k, v = run.layer.qkv(run.x[:, 300:310]).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
    for cache, x in ((run.layer.keys, k), (run.layer.values, v)):
        cache[:, :, 300:310] = x
    run.made.append((k, v))
    for _ in range(60):
        run.step()
    assert run.stores[0].first > 310
    assert_codes_are_those_of_originals(run.stores, made(run))
