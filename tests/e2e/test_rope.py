"""Keys before RoPE: every spelling of the rotation is recognised, what is stored is the key before it, and results are the model's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_models import CHUNKS, Case, by_position, inputs, returned, visible
from rope_models import INTERLEAVED, ROPE_CASES, TURNS, Rotating, RotatingConcat, angles, half_turned, halves, pairs

import kvcompile
from kvcompile.backend import Backend
from kvcompile.errors import AnglesChanged, AnglesUnknown
from kvcompile.lowering.ops.operations import apply_rope, as_tokens, undo_rope_body
from kvcompile.passes.match.rope.angles import Spread

LOSSLESS = "dense(pre_rope=True)"
WINDOWED = {"k": LOSSLESS, "v": "kivi(bits=4,group=8,window=8)"}
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def eager(scheme: object = LOSSLESS, **options: Any) -> Backend:
    """A strict backend that compiles nothing after the rewrite."""
    return kvcompile.backend(scheme, inner="eager", strict=True, **options)


def run(case: Case, backend: Backend, dtype: torch.dtype = torch.float32) -> tuple[float, torch.nn.Module, torch.nn.Module]:
    """The largest difference of all results, and both modules with their caches full."""
    module = case.make(dtype)
    plain = copy.deepcopy(module)
    given = inputs(module, CHUNKS, dtype)
    with torch.no_grad():
        expected = case.drive(plain, plain, given)
        found = case.drive(module, torch.compile(module, backend=backend, fullgraph=True), given)
    return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)), module, plain


def of(turn: Callable[..., torch.Tensor], drive: Any = by_position) -> Case:
    """A case of one rotation."""
    return Case(getattr(turn, "__name__", "turn"), lambda **sizes: Rotating(turn, **sizes), drive)


def stored(module: Any) -> torch.Tensor:
    """What the key store of a module holds, [B, K, T, D], as it is."""
    store = next(iter(module.k_cache._kv.stores.values()))
    return as_tokens(store.planes[0])[:, :, : sum(CHUNKS)]


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_every_spelling(case: Case) -> None:
    backend = eager()
    error, module, plain = run(case, backend)
    assert error <= TOLERANCE
    x = torch.cat(inputs(module), 1)
    with torch.no_grad():
        before = plain.project(x)[1]
        before = (plain.norm(before) if case.name == "normed" else before).transpose(1, 2)
    assert (stored(module) - before).abs().max() <= TOLERANCE, "what is stored is not the key before its rotation"
    length = sum(CHUNKS)
    assert (kvcompile.decoded(module.k_cache) - plain.k_cache)[:, :, :length].abs().max() <= TOLERANCE
    ropes = [item.key.rope for record in backend.records for item in record.planned.sites]
    assert all(rope.interleaved == (case.name in INTERLEAVED or case.name == "sliced-table") for rope in ropes)
    assert {rope.angles.width for rope in ropes} == {{"partial": 8, "two_channels": 2}.get(case.name, 16)}
    assert len({rope.angles for rope in ropes}) == 1, "one model, one function of the position, whatever the graph's shapes"


def test_concatenated_caches() -> None:
    case = Case("concat", lambda **sizes: RotatingConcat(halves, **sizes), returned(None))
    assert run(case, eager())[0] <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turn", [halves, pairs], ids=lambda turn: turn.__name__)
def test_half_precision(turn: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    assert run(of(turn), eager(), dtype)[0] <= {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]


def test_a_window_of_keys_before_rope() -> None:
    error, _, _ = run(of(halves), eager(WINDOWED))
    post, _, _ = run(of(halves), eager({"k": "dense", "v": WINDOWED["v"]}))
    assert error == pytest.approx(post, abs=TOLERANCE) and error > 1e-4


def test_per_channel_codes_of_slow_channels_gain_from_it() -> None:
    """Keys with a constant part: RoPE makes waves of it, which 2 bits over 8 tokens cannot follow."""
    errors = {}
    for scheme in ("kivi(group=8,window=8)", "kivi(group=8,window=8,pre_rope=True)"):
        torch._dynamo.reset()
        case = of(lambda m, x, pos: halves(m, x + 8 * m.norm.weight, pos))
        errors[scheme], module, plain = run(case, eager(scheme))
        errors[scheme] = (kvcompile.decoded(module.k_cache) - plain.k_cache)[:, :, : sum(CHUNKS)].abs().mean().item()
    post, pre = errors.values()
    assert pre < post / 2


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_is_the_inverse_of_whatever_the_tables_hold(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 16, generator=generator, dtype=torch.float64).float()
    cos, sin = (torch.rand(2, 5, 8, generator=generator) + 0.5 for _ in range(2))
    assert torch.allclose(undo_rope_body(apply_rope(x, cos, sin, interleaved), cos, sin, interleaved), x, atol=1e-5)
    assert torch.equal(undo_rope_body(x, cos, sin, interleaved)[..., 8:], x[..., 8:])


def test_channels_read_the_frequencies_as_they_are_laid_out() -> None:
    spreads = {}
    for name in ("halves", "pairs", "two_tables"):
        torch._dynamo.reset()
        backend = eager()
        run(of(TURNS[name]), backend)
        spreads[name] = backend.records[-1].planned.sites[0].key.rope.angles.spread
    assert spreads == {"halves": Spread.HALVES, "pairs": Spread.PAIRS, "two_tables": Spread.WHOLE}


# --- positions that are not the cache's ---------------------------------------------------------------


def late(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return halves(m, x, pos * 3 + 5)


def test_positions_that_are_not_the_places_in_the_cache() -> None:
    error, module, plain = run(of(late), eager())
    assert error <= TOLERANCE
    assert (kvcompile.decoded(module.k_cache) - plain.k_cache).abs().max() <= TOLERANCE


@pytest.mark.parametrize("turn", [halves, TURNS["complex_table"]], ids=["angles", "table"])
@pytest.mark.parametrize("scheme", [LOSSLESS, "kivi(bits=4,group=8,window=8,pre_rope=True)"])
def test_a_filled_cache_is_turned_back(turn: Callable[..., torch.Tensor], scheme: str) -> None:
    module = of(turn).make()
    plain = copy.deepcopy(module)
    chunks = inputs(module)
    with torch.no_grad():
        expected = by_position(plain, plain, chunks)
        first = module(chunks[0], torch.arange(chunks[0].shape[1]))
        compiled = torch.compile(module, backend=eager(scheme), fullgraph=True)
        found, start = [first], first.shape[1]
        for x in chunks[1:]:
            found.append(compiled(x, torch.arange(start, start + x.shape[1])))
            start += x.shape[1]
    bound = TOLERANCE if scheme == LOSSLESS else 0.05
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) <= bound


# --- what the caller may do with the cache ------------------------------------------------------------


def decoded_keys(module: Any) -> torch.Tensor:
    return kvcompile.decoded(module.k_cache)[:, :, : sum(CHUNKS)]


def test_copies_and_rows_keep_their_angles() -> None:
    _, module, plain = run(of(halves), eager())
    keys = plain.k_cache[:, :, : sum(CHUNKS)]
    assert (kvcompile.decoded(copy.deepcopy(module.k_cache))[:, :, : sum(CHUNKS)] - keys).abs().max() <= TOLERANCE
    turned = kvcompile.decoded(module.k_cache.index_select(0, torch.tensor([1, 1, 0])))
    assert (turned[:, :, : sum(CHUNKS)] - keys[[1, 1, 0]]).abs().max() <= TOLERANCE


def test_a_loaded_cache_says_that_its_angles_are_unknown() -> None:
    _, module, _ = run(of(halves), eager())
    file = io.BytesIO()
    torch.save(module.k_cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(AnglesUnknown, match="call the compiled model"):
        kvcompile.decoded(loaded)


def test_frequencies_that_change_under_a_cache() -> None:
    module = of(halves).make()
    compiled = torch.compile(module, backend=eager(), fullgraph=True)
    chunks = inputs(module)
    with torch.no_grad():
        by_position(module, compiled, chunks)
        before = decoded_keys(module)
        module.frequencies = module.frequencies.clone()
        compiled(chunks[1], torch.arange(16, 17))
        module.frequencies.mul_(0.5)
        with pytest.raises(AnglesChanged, match="start a new cache"):
            compiled(chunks[1], torch.arange(17, 18))
        assert torch.equal(decoded_keys(module), before)
        module.k_cache.zero_(), module.v_cache.zero_()
        compiled(chunks[0], torch.arange(7))


# --- refused ------------------------------------------------------------------------------------------


def refused(case: Case, reason: str) -> None:
    """Refused for ``reason``, and right as it was."""
    backend = kvcompile.backend(LOSSLESS, inner="eager")
    error, module, _ = run(case, backend)
    assert error == 0 and type(module.k_cache) is torch.Tensor
    report = backend.report()
    assert report.sites == 0 and report.refusals
    assert all(reason in item.reason for item in report.refusals), [item.reason for item in report.refusals]
    assert all("without pre_rope" in item.advice for item in report.refusals)


def none(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return x


def last_channels(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :8], TURNS["partial"](m, x.roll(8, -1), pos)[..., :8]], -1)


def by_length(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    stretch = 1 + (pos.max() > 10) * 0.5
    angle = torch.cat([pos.float().unsqueeze(-1) * (m.frequencies / stretch)] * 2, -1)[:, None]
    return x * angle.cos() + half_turned(x) * angle.sin()


def in_place_by_length(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.frequencies.copy_(torch.where(pos.max() > 10, m.frequencies * 0.5, m.frequencies))
    return halves(m, x, pos)


def of_another_token(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    angle = torch.cat([angles(m, pos[:1])] * 2, -1)
    return x * angle.cos() + half_turned(x) * angle.sin()


def reflected(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    cos, sin = angles(m, pos).cos(), angles(m, pos).sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, first * sin + second * cos], -1)


def other_rest(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return torch.cat([TURNS["partial"](m, x, pos)[..., :8], x[..., 8:].tanh()], -1)


@pytest.mark.parametrize(("turn", "reason"), [
    (none, "no rotation of the keys was found"), (last_channels, "not the first ones"), (by_length, "not a function of"),
    (in_place_by_length, "updated in place"), (reflected, "no known rotation"), (other_rest, "come from another value"),
], ids=lambda item: getattr(item, "__name__", ""))
def test_refused_for_its_reason(turn: Callable[..., torch.Tensor], reason: str) -> None:
    refused(of(turn), reason)


@pytest.mark.parametrize("count", [2, 7])
def test_angles_of_another_token_are_refused(count: int) -> None:
    backend = kvcompile.backend(LOSSLESS, inner="eager")
    module = of(of_another_token).make()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(inputs(module, (count,))[0], torch.arange(count))
    assert "another token" in backend.report().refusals[0].reason


class ValuesFirst(Rotating):
    """Values and keys in one tensor [2, B, H, C, D], the values first, written at once."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(halves, **sizes)
        del self.k_cache, self.v_cache
        self.register_buffer("cache", torch.zeros(2, self.batch, self.kv, self.capacity, self.dim))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.rotated(x, pos)
        values, keys = self.cache.index_copy_(3, pos, torch.stack([v, k])).unbind(0)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity), enable_gqa=True))


def test_keys_that_are_written_behind_their_values() -> None:
    backend = eager()
    module = ValuesFirst().eval()
    plain = copy.deepcopy(module)
    given = inputs(module)
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=backend, fullgraph=True), given)
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) <= TOLERANCE
    assert all(item.key.rope is not None for record in backend.records for item in record.planned.sites)


class Outside(Rotating):
    """The angles are arguments."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        q, k, v = (item.transpose(1, 2) for item in (q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin, v))
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity), enable_gqa=True))


def test_angles_from_outside_are_refused() -> None:
    def drive(module: Any, call: Any, chunks: Any) -> list[torch.Tensor]:
        def given(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            angle = torch.cat([angles(module, pos)] * 2, -1)
            return call(x, pos, angle.cos(), angle.sin())

        return by_position(module, given, chunks)

    refused(Case("outside", lambda **sizes: Outside(halves, **sizes), drive), "from outside of this graph")


class Late(Rotating):
    """Keys are rotated after they are read from the cache."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        keys, values = self.k_cache.index_copy_(2, pos, k.transpose(1, 2)), self.v_cache.index_copy_(2, pos, v.transpose(1, 2))
        keys = halves(self, keys.transpose(1, 2), torch.arange(self.capacity)).transpose(1, 2)
        q = halves(self, q, pos).transpose(1, 2)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity), enable_gqa=True))


def test_a_rotation_after_the_read_is_refused() -> None:
    backend = kvcompile.backend(LOSSLESS, inner="eager")
    error, _, _ = run(Case("late", lambda **sizes: Late(halves, **sizes), by_position), backend)
    assert error == 0 and backend.report().sites == 0
    assert all("made from the cache" in item.reason for item in backend.report().refusals)


class Peeking(Rotating):
    """The rotated keys are read elsewhere too."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        y = super().forward(x, pos)
        return y + self.k_cache.mean()


def test_keys_that_are_read_elsewhere_are_refused() -> None:
    backend = kvcompile.backend(LOSSLESS, inner="eager")
    error, _, _ = run(Case("peeking", lambda **sizes: Peeking(halves, **sizes), by_position), backend)
    assert error == 0 and all("also read by" in item.reason for item in backend.report().refusals)


class ValuesToo(Rotating):
    """Values are rotated as keys are: they are stored as they come."""

    def rotated(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().rotated(x, pos)
        return q, k, halves(self, v.transpose(1, 2), pos).transpose(1, 2)


class OnlyValues(ValuesToo):
    """Only values are rotated."""

    def rotated(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, _, v = super().rotated(x, pos)
        return q, self.project(x)[1].transpose(1, 2), v


def test_values_are_never_turned() -> None:
    backend = eager()
    error, module, plain = run(Case("values", lambda **sizes: ValuesToo(halves, **sizes), by_position), backend)
    assert error <= TOLERANCE
    values = as_tokens(next(iter(module.v_cache._kv.stores.values())).planes[0])[:, :, : sum(CHUNKS)]
    assert torch.equal(values, plain.v_cache[:, :, : sum(CHUNKS)])
    refused(Case("only values", lambda **sizes: OnlyValues(halves, **sizes), by_position), "no rotation of the keys")
