
from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile.errors import BadOption, DeviceUnsupported, OrderNotKnown
from kvcompile.extensions.smartkv import buckets, codes, moves, reallocation
from kvcompile.extensions.smartkv.buckets import Buckets
from kvcompile.passes.plan.plan import layer_of
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.schemes import Adaptive, Due, Smartkv, StoredLayer, parse
from kvcompile.schemes.adaptive import Reallocated
from kvcompile.types import Role, SlotSpec

B, H, K, D, CAPACITY = 2, 4, 2, 64, 900
QUIET = "tau=1e9,drift=1.0"
"""Options that leave the clock alone to decide when widths are decided."""


@pytest.fixture(autouse=True)
def _quick(one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    """Small tensors on one thread, nothing compiled before."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


class Layer(nn.Module):
    """Attention over a cache of fixed length that it holds itself."""

    def __init__(self, rows: int = B, capacity: int = CAPACITY) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.qkv = nn.Linear(32, (H + 2 * K) * D, bias=False)
        self.register_buffer("keys", torch.zeros(rows, K, capacity, D))
        self.register_buffer("values", torch.zeros(rows, K, capacity, D))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        mask = torch.arange(self.keys.shape[2]) <= pos[:, None]
        return sdpa(q * 2, self.keys, self.values, attn_mask=mask, enable_gqa=True)


class Run:
    """A layer compiled for smartkv, called step by step."""

    def __init__(self, options: str = QUIET, rows: int = B, capacity: int = CAPACITY, seed: int = 5) -> None:
        self.backend = kvcompile.backend(f"smartkv({options})", inner="eager", strict=True)
        self.layer = Layer(rows, capacity)
        self.compiled = torch.compile(self.layer, backend=self.backend, fullgraph=True)
        self.x = torch.randn(rows, capacity, 32, generator=torch.Generator().manual_seed(seed))
        self.at = 0
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def step(self, count: int = 1) -> torch.Tensor:
        """The next tokens."""
        start, self.at = self.at, self.at + count
        # By the very product that the step computes: one of another shape is rounded otherwise.
        _, k, v = self.layer.qkv(self.x[:, start : self.at]).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
        self.made.append((k, v))
        return self.compiled(self.x[:, start : self.at], torch.arange(start, self.at))

    @property
    def stores(self) -> tuple[AdaptiveStore, AdaptiveStore]:
        """The stores of keys and values."""
        found = [next(iter(cache._kv.stores.values())) for cache in (self.layer.keys, self.layer.values)]
        return found[0], found[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, as their memory says."""
        return sum(plane.untyped_storage().nbytes() for store in self.stores for plane in store.planes)

    def widths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bits of keys and values, [B, T]."""
        found = []
        for store in self.stores:
            form = store.scheme.form  # type: ignore[attr-defined]
            levels = buckets.levels(Buckets.of(tuple(store.planes), form), self.at)
            found.append(torch.tensor([*form.widths, 8])[levels.long()])
        return found[0], found[1]

    def importance(self) -> torch.Tensor:
        """Plain importance, [B, T]."""
        plane = self.stores[0].plane("importance")
        assert plane is not None
        return reallocation.by_position(plane, self.at)[..., 0]


def originals(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens so far, as the model makes them."""
    with torch.no_grad():
        _, k, v = run.layer.qkv(run.x[:, : run.at]).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
    return k, v


# --- the budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["budget=0.4", "budget=0.3", "budget=0.45,scale_dtype=float32", "budget=0.4,keys=4/8,values=2/4/8"])
def test_the_budget_is_met_and_never_exceeded(options: str) -> None:
    run = Run(f"{options},{QUIET}")
    budget = parse(f"smartkv({options})").budget  # type: ignore[attr-defined]
    run.step(500)
    fullest, shares = [], []
    while run.at < 720:
        first = run.stores[0].first
        shares.append(run.nbytes / (budget * run.at * B * 2 * K * D * 2))
        assert run.nbytes == sum(store.nbytes for store in run.stores)
        run.step()
        if run.stores[0].first != first:
            fullest.append(max(shares))
            shares = []
    assert len(fullest) >= 3
    assert all(0.98 <= share <= 1 for share in fullest[1:]), fullest
    assert fullest[0] <= 1
    report = run.backend.report()
    assert report.allocated == run.nbytes <= report.announced == int(budget * run.at * B * K * D * 2) * 2


def test_drift_decides_earlier_and_the_budget_holds() -> None:
    run = Run("tau=1e-6")
    run.step(500)
    for _ in range(66):
        assert run.nbytes <= 0.4 * run.at * B * 2 * K * D * 2
        run.step()
    assert run.stores[0].churn.allocations == 1 + 2, "what is seen after 16 steps is read after 32, where the clock alone takes 62"
    quiet = Run()
    quiet.step(500)
    for step in range(66):
        quiet.step()
        assert quiet.stores[0].first == (500 if step < 61 else 560), "decided after 60 steps, moved after 62"
    assert quiet.stores[0].churn.allocations == 2


def test_a_prompt_alone_is_within_the_budget_once_its_call_returns() -> None:
    run = Run()
    run.step(400)
    assert run.stores[0].first == 400
    assert run.nbytes <= 0.4 * 400 * B * 2 * K * D * 2
    # A large chunk behind it as well.
    run.step(300)
    assert run.stores[0].first == 700 and run.nbytes <= 0.4 * 700 * B * 2 * K * D * 2


def test_a_budget_below_the_floor_is_refused_before_anything_is_compiled() -> None:
    spec = SlotSpec(K, D, torch.float32, Role.KEY)
    with pytest.raises(BadOption, match=r"expects budget to be at least 0\.2109 .* pass budget=0\.22"):
        parse("smartkv(budget=0.2)").check(spec)
    parse("smartkv(budget=0.22)").check(spec)
    backend = kvcompile.backend("smartkv(budget=0.2)", inner="eager")
    layer = torch.compile(Layer(), backend=backend)
    with torch.no_grad():
        layer(torch.zeros(B, 3, 32), torch.arange(3))
    (refusal,) = backend.report().refusals
    assert "at least 0.2109" in refusal.reason and not backend.report().sites


def test_the_floor_is_the_bytes_of_the_least_widths() -> None:
    run = Run(f"budget=0.212,{QUIET}")
    run.step(700)
    keys, values = run.widths()
    assert (keys[:, 4:] == 3).all() and (values[:, 4:] == 2).all()
    assert (keys[:, :4] == 8).all(), "protected, whatever the budget"


def test_another_budget_from_a_number_of_tokens_on() -> None:
    run = Run(f"budget=0.5,later=0.3,threshold=600,{QUIET}")
    run.step(500)
    assert 0.3 < run.nbytes / (500 * B * 2 * K * D * 2) <= 0.5
    run.step(200)
    assert 0.2 < run.nbytes / (700 * B * 2 * K * D * 2) <= 0.3


# --- who gets what -----------------------------------------------------------------------------------


def test_widths_follow_importance_and_rows_have_their_own() -> None:
    run = Run()
    run.step(600)
    value = run.importance() * torch.exp(-(599 - torch.arange(600)) / 512)
    keys, values = run.widths()
    assert not torch.equal(keys[0], keys[1])
    for row in range(B):
        for bits in (keys[row, 4:], values[row, 4:]):
            means = [float(value[row, 4:][bits == width].mean()) for width in (2, 3, 4, 8) if (bits == width).any()]
            assert len(means) >= 2 and means == sorted(means)


def test_uniform_importance_gives_uniform_widths() -> None:
    run = Run(f"recency=0.0,budget=0.35,protect_first=0,{QUIET}")
    run.layer.qkv.weight.data[: H * D] = 0
    run.step(600)
    # All tokens that the last queries saw alike differ only in when they came: within a half, two neighbouring widths at most.
    plane = run.stores[0].plane("importance")
    assert plane is not None
    plane[..., :2] = 0.25
    _reallocate(run)
    for bits, chain in zip(run.widths(), ((3, 4, 8), (2, 3, 4, 8)), strict=True):
        used = sorted(set(bits.flatten().tolist()))
        assert len(used) <= 2 and (len(used) == 1 or chain.index(used[1]) == chain.index(used[0]) + 1)


def _reallocate(run: Run) -> None:
    """Decide the widths of a run's tokens now, from tokens that have just entered."""
    keys, values = run.stores
    for store, x in zip((keys, values), originals(run), strict=True):
        store.cut(0)
        store.reserve(0, run.at)
        at = torch.arange(run.at)
        for plane, rows in zip(store.planes, codes.encode(x, 8), strict=False):
            plane[at // 64, :, :, at % 64] = rows.permute(2, 0, 1, 3)
    importance = keys.plane("importance")
    assert importance is not None
    importance[..., :2] = 0.25
    made = decided_and_moved(keys.scheme, [stored_of(run)], run.at)[0]
    keys.exchange(made.keys, run.at)
    values.exchange(made.values, run.at)


def stored_of(run: Run, layer: int = 0) -> StoredLayer:
    """The planes of a run's layer."""
    keys, values = run.stores
    return StoredLayer(tuple(keys.planes), tuple(values.planes), (keys.spec.slot, values.spec.slot), layer, keys.first)


def decided_and_moved(scheme: Adaptive, layers: list[StoredLayer], count: int) -> list[Reallocated]:
    """Widths of ``count`` tokens of some layers decided side by side, and copies of their planes after the move."""
    copies = [
        dataclasses.replace(item, keys=tuple(plane.clone() for plane in item.keys), values=tuple(plane.clone() for plane in item.values))
        for item in layers
    ]
    planes = [item.keys for item in copies]
    decision = scheme.decide(copies, scheme.importance(planes, count, planes))
    return [scheme.move(item, decision, number, count) for number, item in enumerate(copies)]


def test_protected_tokens_have_the_largest_width() -> None:
    run = Run(f"protect_first=6,protect_last=9,{QUIET}")
    run.step(600)
    for bits in run.widths():
        assert (bits[:, :6] == 8).all() and (bits[:, -9:] == 8).all()
        assert (bits[:, 6:-9] < 8).any()


def test_tokens_enter_at_eight_bits_and_never_become_wider() -> None:
    run = Run("tau=1e-6")
    run.step(300)
    for _ in range(80):
        before = run.widths()
        run.step()
        for old, new in zip(before, run.widths(), strict=True):
            assert (new[:, : old.shape[1]] <= old).all()
            assert (new[:, -1] == 8).all() or run.stores[0].first == run.at
    assert run.stores[0].churn.refused > 0


def test_hysteresis_holds_churn_down() -> None:
    moved = {}
    for name, options in (("held", "moved=0.2,checks=3,costs=1.0"), ("free", "moved=0.0,checks=1,costs=0.0")):
        run = Run(f"{options},tau=1e-6,budget=0.45")
        run.step(400)
        for _ in range(160):
            run.step()
        moved[name] = run.stores[0].churn.moved
    assert moved["held"] < moved["free"] / 2


# --- what is stored and what attention reads ------------------------------------------------------------


def test_every_token_has_the_codes_of_its_widths_and_attention_reads_them() -> None:
    """Each step against attention over tokens that are encoded here, one by one, at the widths that the store has had for each."""
    run = Run("budget=0.6,tau=1e-6", rows=1, capacity=220)
    run.step(150)
    held: list[dict[int, tuple[Any, int]]] = [{}, {}]
    for _ in range(66):
        out = run.step()
        k, v = (torch.cat(parts, 2) for parts in zip(*run.made, strict=True))
        plane = run.stores[0].plane("mean")
        assert plane is not None
        mean, decoded = plane[0, 0, :, 0].float(), []
        for half, (x, bits) in enumerate(zip((k, v), run.widths(), strict=True)):
            tokens = torch.empty_like(x)
            for token in range(run.at):
                coded, width = held[half].get(token) or (codes.encode(x[0, :, token], 8), 8)
                # The step itself read what was there before widths were decided behind it.
                value = codes.decode(coded, width)
                tokens[0, :, token] = value if width == 8 or half else codes.turned(value) + mean
                if (new := int(bits[0, token])) < width:
                    value = codes.decode(coded, width)
                    coded, width = codes.encode(codes.turned(value - mean) if width == 8 and not half else value, new), new
                held[half][token] = coded, width
            decoded.append(tokens)
        store = [store.values(0, 4)[:, :, : run.at] for store in run.stores]
        for half in range(2):
            now = [codes.decode(*held[half][token]) for token in range(run.at)]
            if not half:
                now = [x if held[0][token][1] == 8 else codes.turned(x) + mean for token, x in enumerate(now)]
            assert torch.equal(store[half], torch.stack(now, 1)[None])
        with torch.no_grad():
            q = run.layer.qkv(run.x[:, run.at - 1 : run.at]).unflatten(-1, (-1, D)).transpose(1, 2)[:, :H]
        if len(held[0]) > 151:
            assert torch.allclose(out, sdpa(q * 2, *decoded, enable_gqa=True), atol=1e-5)
    assert run.stores[0].churn.allocations >= 3


def test_layers_are_decided_together_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run(seed=seed) for seed in (5, 6, 7)]
    for run in runs:
        run.step(300)
        for _ in range(20):
            run.step()
    stored = [stored_of(run, 4 * number) for number, run in enumerate(runs)]
    scheme = runs[0].stores[0].scheme
    alone = [decided_and_moved(scheme, [item], 320)[0] for item in stored]
    assert len({made.churn for made in alone}) > 1
    for limit in (reallocation.TOGETHER, 2 * B * 320 * 7, 1):
        monkeypatch.setattr(reallocation, "TOGETHER", limit)
        together = decided_and_moved(scheme, stored, 320)
        for one, other in zip(alone, together, strict=True):
            assert one.churn == other.churn
            assert all(torch.equal(a, b) for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True))


def test_planes_stay_where_they_are_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph is recorded with the addresses of planes, so moves keep them."""
    for module in (moves, reallocation):
        monkeypatch.setattr(module, "SLACK", 16)
    run = Run("tau=1e-6,budget=0.5", capacity=1600)
    run.step(1200)
    places: list[set[int]] = []
    seen = 0
    while seen < 8:
        first = run.stores[0].first
        run.step()
        assert run.nbytes <= 0.5 * run.at * B * 2 * K * D * 2
        if run.stores[0].first != first:
            seen += 1
            # Heads, and what grows by position, are others' concern.
            now = {plane.data_ptr() for store in run.stores for plane in store.planes[: buckets.MEAN]}
            if now not in places:
                places.append(now)
    assert len(places) <= 4, "there is room for 75 tokens more, and a move comes every 32 steps"


def test_what_is_decided_is_carried_out_by_whatever_graph_runs_next() -> None:
    """A decision waits with its stores: another graph of the same model, here a piece of a prompt, moves the tokens."""
    run, plain = Run(), Run()
    for each in (run, plain):
        each.step(500)
    while run.stores[0].decision is None:
        run.step()
    assert run.at == 560 and run.stores[0].first == 500
    kept, older = ((run.layer.keys.clone(), run.layer.values.clone()) for _ in range(2))
    run.step(7)
    assert run.stores[0].first == 560 and run.stores[0].decision is None and run.stores[0].churn.allocations == 2
    entered = run.stores[0].values(0, 9)[:, :, 560:567]
    assert torch.equal(entered, codes.decode(codes.encode(originals(run)[0][:, :, 560:], 8), 8))
    # A copy that was made in between goes the same way; what goes back forgets the decision.
    run.layer.keys, run.layer.values, run.at = *kept, 560
    run.step(7)
    assert run.stores[0].first == 560
    run.layer.keys, run.layer.values, run.at = *older, 540
    run.step()
    assert run.stores[0].decision is None and run.stores[0].first == 500


def test_a_step_that_decides_nothing_asks_the_device_for_no_number() -> None:
    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in func.name() and "nonzero" not in func.name(), func.name()
            return func(*args, **(kwargs or {}))

    run = Run("tau=1e-6")
    run.step(300)
    for _ in range(20):
        run.step()
    keys, values = run.stores
    assert keys.first == 300
    with Asked():
        for tokens in range(321, 325):
            for store in (keys, values):
                # Room for the next token, as a growing cache makes it at every step.
                store.reserve(8, tokens)
            assert keys.due(tokens, 0) is Due.NOT


def test_a_scheme_that_was_pickled_is_found_again() -> None:
    scheme, same = Smartkv(budget=0.3), Smartkv(budget=0.3)
    # What the options hash to in another process.
    scheme.__dict__["_hash"] = hash(scheme) + 1
    loaded = pickle.loads(pickle.dumps(scheme))
    assert loaded == same == scheme and hash(loaded) == hash(same) != hash(scheme)


def test_the_first_tokens_one_by_one() -> None:
    run, plain = Run(), Layer()
    with torch.no_grad():
        for at in range(80):
            out = run.step()
            wanted = plain(run.x[:, at : at + 1], torch.tensor([at]))
            assert torch.allclose(out, wanted, atol=0.02), at
    # A page of tokens at eight bits alone is more than the budget of so few.
    assert run.stores[0].first == 0 and run.backend.report().widths == {role: {8: 80 * B} for role in Role}
    assert run.nbytes > 0.4 * 80 * B * 2 * K * D * 2
    while run.stores[0].first == 0:
        run.step()
    assert 150 < run.at < 210 and run.nbytes <= 0.4 * run.at * B * 2 * K * D * 2


def test_growing_compiles_nothing() -> None:
    run = Run()
    run.step(200)
    run.step()
    graphs = len(run.backend.graphs)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(150):
        run.step()
    run.step(1)
    assert len(run.backend.graphs) == graphs and torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted


def test_the_report_shows_widths_bytes_and_churn() -> None:
    run = Run()
    run.step(600)
    report = run.backend.report()
    for role, bits in zip(Role, run.widths(), strict=True):
        assert report.widths[role] == {width: int((bits == width).sum()) for width in (2, 3, 4, 8) if (bits == width).any()}
    text = " ".join(str(report).split())
    assert f"keys of {600 * B} stored tokens: 3 bits" in text and "1 reallocation, 0 widths of settled tokens changed" in text


# --- what callers do -----------------------------------------------------------------------------------


def test_reset_begins_anew() -> None:
    run = Run()
    first = [run.step(200), *(run.step() for _ in range(40))]
    for cache in (run.layer.keys, run.layer.values):
        cache.zero_()
    # What does not grow: one position, where buckets end, what is added to keys, an average for each head.
    assert run.nbytes < 800
    run.at = 0
    again = [run.step(200), *(run.step() for _ in range(40))]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("back", [3, 60, 239])
def test_going_back_forgets_what_is_behind(back: int) -> None:
    run, other = Run(seed=5), Run(seed=5)
    for each in (run, other):
        each.step(200)
        for _ in range(40):
            each.step()
    other.x[:, 240 - back :] = torch.randn(B, CAPACITY - 240 + back, 32, generator=torch.Generator().manual_seed(77))
    run.x = other.x
    kept = [store.values(0, 4)[:, :, : 240 - back].clone() for store in run.stores]
    run.at = 240 - back
    out = run.step()
    assert run.layer.keys._kv.length == run.at
    for store, before in zip(run.stores, kept, strict=True):
        now = store.values(0, 4)[:, :, : 240 - back]
        assert torch.equal(now, before) or store.first == run.at
    k, v = (store.values(0, 4)[:, :, : run.at] for store in run.stores)
    with torch.no_grad():
        q = run.layer.qkv(run.x[:, run.at - 1 : run.at]).unflatten(-1, (-1, D)).transpose(1, 2)[:, :H]
    if run.stores[0].first != run.at:
        assert torch.allclose(out, sdpa(q * 2, k, v, enable_gqa=True), atol=1e-5)
    for _ in range(70):
        run.step()
        assert run.layer.keys._kv.length == run.at


def test_pickles_and_copies_go_on_alike() -> None:
    run = Run()
    run.step(200)
    for _ in range(20):
        run.step()
    saved = io.BytesIO()
    torch.save([run.layer.keys, run.layer.values], saved)
    saved.seek(0)
    copies = [copy.deepcopy([run.layer.keys, run.layer.values]), torch.load(saved, weights_only=False)]
    at = run.at
    wanted = [run.step() for _ in range(30)]
    for keys, values in copies:
        run.layer.keys, run.layer.values, run.at = keys, values, at
        assert all(torch.equal(run.step(), want) for want in wanted)


def test_a_read_from_outside_decodes_and_a_write_in_the_middle_makes_it_dense(caplog: Any) -> None:
    run = Run()
    run.step(200)
    run.step()
    k, _ = originals(run)
    whole = run.layer.keys + 0
    assert torch.equal(whole[:, :, :201], run.stores[0].values(0, 4)[:, :, :201]) and not whole[:, :, 201:].any()
    assert 0 < (whole[:, :, :201] - k).abs().max() < 1.5
    with caplog.at_level(logging.WARNING):
        run.layer.keys[:, :, 7] = 0.5
    assert type(run.layer.keys) is torch.Tensor and "becomes the dense tensor" in caplog.text
    expected = whole.clone()
    expected[:, :, 7] = 0.5
    assert torch.equal(run.layer.keys, expected)


def test_tokens_written_behind_all_others_are_encoded() -> None:
    run, plain = Run(), Run()
    run.step(300)
    plain.step(310)
    run.at = 310
    k, v = originals(run)
    for cache, x in ((run.layer.keys, k), (run.layer.values, v)):
        cache[:, :, 300:310] = x[:, :, 300:]
    assert [store.first for store in run.stores] == [300, 300]
    for store, x in zip(run.stores, (k, v), strict=True):
        assert torch.equal(store.values(0, 5)[:, :, 300:310], codes.decode(codes.encode(x[:, :, 300:], 8), 8))
    run.step()
    assert run.layer.keys._kv.length == 311


def test_a_copy_goes_its_own_way() -> None:
    run = Run("tau=1e-6")
    run.step(200)
    first, older = (run.layer.keys, run.layer.values), (run.layer.keys.clone(), run.layer.values.clone())
    once = [run.step() for _ in range(40)]
    held = [store.values(0, 4).clone() for store in run.stores]
    run.layer.keys, run.layer.values, run.at = *older, 200
    assert all(torch.equal(run.step(), out) for out in once)
    run.layer.keys, run.layer.values = first
    assert all(torch.equal(store.values(0, 4), was) for store, was in zip(run.stores, held, strict=True))


def test_a_step_that_fails_leaves_the_stores_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step(300)
    for _ in range(10):
        run.step()
    before = [[plane.clone() for plane in store.planes] for store in run.stores]
    for bound in _bound_graphs():
        for variant, (rewritten, _) in list(bound.variants.items()):
            monkeypatch.setitem(bound.variants, variant, (rewritten, _fails))
    run.at = 150
    with pytest.raises(RuntimeError, match="interrupted"):
        run.step()
    assert [store.first for store in run.stores] == [300, 300]
    for store, planes in zip(run.stores, before, strict=True):
        assert all(torch.equal(now, was) for now, was in zip(store.planes, planes, strict=True))


def _fails(*args: Any) -> Any:
    raise RuntimeError("interrupted")


def _bound_graphs() -> list[Any]:
    import gc

    from kvcompile.runtime.call.bound import BoundGraph

    return [item for item in gc.get_objects() if type(item) is BoundGraph and item.dense is not None and item.forms[0].kind.in_place]


# --- refusals ------------------------------------------------------------------------------------------


def test_rows_with_positions_of_their_own_are_refused() -> None:
    class Rows(Layer):
        def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split([H, K, K], 1)
            rows = torch.arange(B)
            self.keys[rows, :, pos] = k[:, :, 0]
            self.values[rows, :, pos] = v[:, :, 0]
            mask = torch.arange(self.keys.shape[2]) <= pos[:, None, None, None]
            return sdpa(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)

    backend = kvcompile.backend("smartkv", inner="eager")
    layer = Rows()
    with torch.no_grad():
        torch.compile(layer, backend=backend)(torch.zeros(B, 1, 32), torch.tensor([3, 5]))
    (refusal,) = backend.report().refusals
    assert "separate positions for each batch row" in refusal.reason
    assert type(layer.keys) is torch.Tensor


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Smartkv, "devices", ("cuda",))
    backend = kvcompile.backend("smartkv", inner="eager")
    layer, plain = Layer(), Layer()
    x, pos = torch.randn(B, 3, 32), torch.arange(3)
    with torch.no_grad():
        assert torch.allclose(torch.compile(layer, backend=backend)(x, pos), plain(x, pos), atol=1e-6)
    (refusal,) = backend.report().refusals
    assert "expects a cache on cuda, found one on cpu" in refusal.reason and type(layer.keys) is torch.Tensor
    assert parse("smartkv").devices == ("cuda",)


def test_options_that_cannot_be_are_refused() -> None:
    assert "expects a cache on cpu" in str(DeviceUnsupported(scheme="smartkv", path="*", known="cpu", device="cuda"))
    assert "found a pool" in str(OrderNotKnown(scheme="smartkv", path="*", found="a pool"))
    with pytest.raises(BadOption, match="layer_weights"):
        Smartkv(layer_weights="1/x")
    with pytest.raises(BadOption, match="a number for every layer, 3 at least"):
        Smartkv(layer_weights="1/2").check_site(SlotSpec(K, D, torch.float32, Role.KEY), SlotSpec(K, D, torch.float32, Role.VALUE), 2)


@pytest.mark.parametrize(("path", "index", "number"), [
    ("model.layers.7.self_attn", 0, 7), ("h.11.attn", 3, 11), ("", 4, 4), ("attn", 2, 2), ("block2.attn", 5, 5),
])
def test_a_layer_has_the_number_in_its_path(path: str, index: int, number: int) -> None:
    assert layer_of(path, index) == number
