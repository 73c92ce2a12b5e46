"""squat's laws: the algebra against the source's recursion, the codes against the moved keys, the graph that teaches a store."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from typing import Any

import pytest
import torch
from e2e_models import IndexCopyAttribute, TrilMask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvcompile
from kvcompile import schemes
from kvcompile.backend import Backend
from kvcompile.errors import BadOption, HeadDimNotDivisible, UnknownScheme
from kvcompile.extensions.squat import subspace
from kvcompile.extensions.squat.scheme import Queries, Subspace, Unit
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.operations import calibrate_body
from kvcompile.runtime.store.codec import decode
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import Kivi, Squat, make, parse
from kvcompile.schemes.rotation import Rotate
from kvcompile.testing.samples import normal
from kvcompile.types import Extent, Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


def slot(width: int = WIDTH, heads: int = 2) -> SlotSpec:
    """A slot of keys."""
    return SlotSpec(heads, width, torch.float32, Role.KEY)


def keys_of(**options: Any) -> Squat:
    """squat as it holds keys."""
    scheme = Squat(**options).for_role(Role.KEY)
    assert isinstance(scheme, Squat)
    return scheme


def correlated(rows: int, width: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Queries [rows, D] of a few directions with falling weight, and a little of all others."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q[:rank]
    weights = torch.linspace(3, 1, rank)
    return (torch.randn(rows, rank, generator=generator) * weights) @ directions + 0.05 * torch.randn(rows, width, generator=generator)


def calibrated(scheme: Squat, q_nD: torch.Tensor, heads: int = 2) -> torch.Tensor:
    """The plane that queries [n, D], the same for every head, make."""
    return scheme.calibrate(q_nD.expand(1, heads, 1, -1, -1), None)[0]


def decoded(scheme: Kivi, x: torch.Tensor, *fixed: torch.Tensor) -> torch.Tensor:
    """What the codes stand for."""
    return scheme.decode(scheme.encode(x, *fixed), slot(x.shape[-1], x.shape[1]))


# --- the algebra -------------------------------------------------------------------------------------------


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """(lam Qhat^T Qhat in float64, sub-block) over widths, ranks, strengths."""
    block = draw(st.sampled_from([1, 2, 4, 8]))
    width = block * draw(st.integers(2, 5))
    rank = draw(st.integers(1, width))
    q = torch.randn(rank, width, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6))))
    return draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0])) * q.mT @ q, block


def source_moves(weight: torch.Tensor, block: int, inverses: list[torch.Tensor]) -> torch.Tensor:
    """(B_t H_t)^T row block by row block, from the inverses of A_1, A_2, ... as the source has it."""
    width = len(weight)
    inverse = torch.linalg.inv(torch.eye(width, dtype=weight.dtype) + weight)
    moves = torch.zeros_like(weight)
    for t, a in enumerate(inverses[:-1], start=1):
        end = t * block
        moves[end - block : end, end:] = (inverse[end:, :end] @ a[:, -block:]).mT
    return moves


@settings(max_examples=60, deadline=None)
@given(weights())
def test_moves_are_the_sources_closed_form(given_: tuple[torch.Tensor, int]) -> None:
    weight, block = given_
    width = len(weight)
    inverse = torch.linalg.inv(torch.eye(width, dtype=weight.dtype) + weight)
    direct = [torch.linalg.inv(inverse[:end, :end]) for end in range(block, width + 1, block)]
    assert torch.allclose(subspace.moves(weight, block), source_moves(weight, block, direct), atol=1e-8, rtol=1e-8)


@settings(max_examples=60, deadline=None)
@given(weights())
def test_the_sources_recursion_is_direct_inversion(given_: tuple[torch.Tensor, int]) -> None:
    """Lemma 3, and with blocks of one channel Proposition 2: from P itself down to the first block."""
    weight, block = given_
    width = len(weight)
    weighted = torch.eye(width, dtype=weight.dtype) + weight
    inverse = torch.linalg.inv(weighted)
    found = [weighted]
    while len(found[0]) > block:
        whole, end = found[0], len(found[0]) - block
        aside, corner = whole[end:, :end], whole[end:, end:]
        found.insert(0, whole[:end, :end] - aside.mT @ torch.linalg.solve(corner, aside))
    for t, a in enumerate(found, start=1):
        assert torch.allclose(a, torch.linalg.inv(inverse[: t * block, : t * block]), atol=1e-8, rtol=1e-8)
    assert torch.allclose(subspace.moves(weight, block), source_moves(weight, block, found), atol=1e-8, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(weights(), st.integers(0, 10**6))
def test_one_channel_at_a_time_is_equation_3(given_: tuple[torch.Tensor, int], seed: int) -> None:
    """Eq. 3 moves by (deq - k)_t B_t h_t, h_t the last column of inv(A_t); Eq. 6 with g = 1 by our row t."""
    weight, _ = given_
    width = len(weight)
    inverse = torch.linalg.inv(torch.eye(width, dtype=weight.dtype) + weight)
    moves = subspace.moves(weight, 1)
    error = torch.randn(width, dtype=weight.dtype, generator=torch.Generator().manual_seed(seed))
    for t in range(1, width):
        h = torch.linalg.inv(inverse[:t, :t])[:, -1]
        assert torch.allclose(error[t - 1] * (inverse[t:, :t] @ h), error[t - 1 : t] @ moves[t - 1 : t, t:], atol=1e-8, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(weights(), st.integers(0, 10**6))
def test_the_movement_is_the_minimizer(given_: tuple[torch.Tensor, int], seed: int) -> None:
    """Lemma 2's problem: no other movement of the later channels makes |delta|^2 + lam |Qhat delta|^2 smaller."""
    weight, block = given_
    width = len(weight)
    generator = torch.Generator().manual_seed(seed)
    moves = subspace.moves(weight, block)
    for start in range(0, width - block, block):
        end = start + block
        delta = torch.zeros(width, dtype=weight.dtype)
        delta[start:end] = torch.randn(block, dtype=weight.dtype, generator=generator)
        delta[end:] = delta[start:end] @ moves[start:end, end:]
        gradient = (weight @ delta + delta)[end:]
        assert gradient.abs().max() <= 1e-8 * (1 + weight.abs().max())


@pytest.mark.parametrize("rank", [1, 3, 8, 30, 64])
def test_leading_directions_are_those_of_an_eigendecomposition(rank: int) -> None:
    spectrum = torch.cat([torch.logspace(2, 0, max(rank, 2))[:rank], torch.logspace(-0.5, -3, WIDTH - rank)]).to(torch.float64)
    vectors = torch.linalg.qr(torch.randn(2, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))).Q
    gram = vectors @ (spectrum[:, None] * vectors.mT)
    top = vectors[..., :rank]
    expected = top @ (spectrum[:rank, None] * top.mT)
    assert (subspace.leading(gram, rank) - expected).norm() <= 1e-6 * expected.norm()


SPECTRA = {
    "flat": torch.ones(WIDTH, dtype=torch.float64), "falling": torch.logspace(0, -2, WIDTH, dtype=torch.float64),
    "one loud direction": torch.cat([torch.tensor([1e3]), torch.logspace(0, -1, WIDTH - 1)]).to(torch.float64),
}
"""Root mean squares of queries along their directions; what is sampled has neighbouring singular values a percent or so apart."""


@pytest.mark.parametrize("rank", [1, 5, 20, 30, 60])
@pytest.mark.parametrize("kind", SPECTRA)
def test_neighbouring_directions_are_not_mixed(kind: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator)).Q
    q = torch.randn(2, 500, WIDTH, dtype=torch.float64, generator=generator) * SPECTRA[kind] @ turn
    gram = q.mT @ q
    weights, vectors = torch.linalg.eigh(gram)
    top = vectors[..., -rank:]
    # The eigendecomposition's own vectors are as exact as rounding over the gap.
    gap = (weights[..., -rank] - weights[..., -rank - 1]).min() / weights.amax()
    assert (subspace.leading_projector(gram, rank) - top @ top.mT).norm() <= 1e-8 + 1e-14 / gap
    expected = top @ (weights[..., -rank:, None] * top.mT)
    assert (subspace.leading(gram, rank) - expected).norm() <= 1e-9 * expected.norm()


def test_directions_of_equal_weight_hold_no_more_than_they_can() -> None:
    spectrum = torch.tensor([4.0, 2.0, 2.0, 2.0, *[1.0] * 4], dtype=torch.float64)
    held = subspace.leading(spectrum.diag(), 2)
    assert held[0, 0] == pytest.approx(4.0) and not held[4:].any()
    assert (held.diagonal()[1:4] <= 2.0).all() and held[1, 1] == held[2, 2] == held[3, 3]


class Decisions(TorchDispatchMode):
    """Refuses operators that look at a result on the host: on a CUDA device they would wait for it."""

    HOST = ("_local_scalar_dense", "linalg_eigh", "linalg_svd", "linalg_eig", "check_errors", "nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(part in name for part in self.HOST), f"{name} looks at a result on the host"
        return func(*args, **(kwargs or {}))


def test_learning_waits_for_no_device() -> None:
    scheme = keys_of(rank=20)
    with Decisions():
        scheme.calibrate(torch.randn(2, 2, 2, 40, WIDTH), torch.ones(2, 40, dtype=torch.bool))
        with pytest.raises(AssertionError, match="eigh looks at a result"):
            torch.linalg.eigh(torch.eye(3))


@pytest.mark.gpu
def test_learning_waits_for_no_device_on_a_gpu() -> None:
    scheme = keys_of(rank=20)
    q = torch.randn(1, 2, 2, 40, WIDTH)
    expected = scheme.calibrate(q, None)[0]
    there = q.cuda()
    scheme.calibrate(there, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = scheme.calibrate(there, None)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(made.cpu(), expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 19])
def test_fewer_queries_than_directions(count: int) -> None:
    q = torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    gram = q.mT @ q
    assert (subspace.leading(gram, 20) - gram).norm() <= 1e-4 * gram.norm()
    assert not subspace.moves(subspace.leading(torch.zeros_like(gram), 20), 8).any()


# --- codes -------------------------------------------------------------------------------------------------

values = st.builds(
    lambda seed, spread, odd: _odd(torch.randn(1, 2, 64, WIDTH, generator=torch.Generator().manual_seed(seed)) * spread, odd, seed),
    st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e3]), st.sampled_from(["", "zero", "-zero", "nan", "inf", "half"]),
)


def _odd(x: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """A tensor with a few values that arithmetic treats in its own way."""
    put = {"zero": 0.0, "-zero": -0.0, "nan": float("nan"), "inf": float("inf")}
    if kind == "half":
        return (x * 4).round() / 4
    if kind:
        x[0, seed % 2, seed % 64, seed % WIDTH] = put[kind]
        x[0, 0, :32, 5] = put[kind]
    return x


def bits_of(plane: torch.Tensor) -> torch.Tensor:
    """A plane as bytes. NaN counts as one value, and so do both zeros: which of them a minimum is depends on the memory's order."""
    if not plane.is_floating_point():
        return plane
    return torch.where(torch.isnan(plane), torch.full_like(plane, float("nan")), plane + 0).view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(values, st.sampled_from([2, 3, 4]), st.sampled_from([16, 32]), st.sampled_from([1, 8, 32]))
def test_lam_zero_is_kivi_bit_for_bit(x: torch.Tensor, bits: int, group: int, block: int) -> None:
    kivi = Kivi(bits, group).for_role(Role.KEY)
    plain = keys_of(bits=bits, group=group, subblock=block, lam=0.0)
    assert plain.layout(slot()) == kivi.layout(slot())
    moved = keys_of(bits=bits, group=group, subblock=block)
    nothing = torch.zeros(1, 1, 2, WIDTH, WIDTH)
    for a, b, c in zip(kivi.encode(x), plain.encode(x), moved.encode(x, nothing), strict=True):
        assert torch.equal(bits_of(a), bits_of(b)) and torch.equal(bits_of(a), bits_of(c))


def test_values_are_kivis() -> None:
    sizes: dict[str, Any] = {"bits": 3, "group": 16, "window": 64}
    for turned in Rotate:
        assert Squat(**sizes, rotate=turned).for_role(Role.VALUE) == Kivi(**sizes, rotate=turned).for_role(Role.VALUE)


@settings(max_examples=40, deadline=None)
@given(values, st.sampled_from([2, 3, 4]), st.sampled_from([1, 8, 16, 32]), st.sampled_from([0.1, 1.0, 100.0]))
def test_codes_round_the_moved_keys(x: torch.Tensor, bits: int, block: int, lam: float) -> None:
    """From codes and plane alone the movement can be replayed, and every code is within half a step of the key as it was moved.

    So |x - decode| <= s / 2 + |moves|^T s / 2, channel by channel, with the stored scales s: what ``bound`` says in words.
    """
    scheme = keys_of(bits=bits, subblock=block, lam=lam, rank=8)
    plane = calibrated(scheme, correlated(200, WIDTH, 8))
    planes = scheme.encode(x, plane)
    found = scheme.decode(planes, slot()).to(torch.float64)
    half = planes[1].to(torch.float64).repeat_interleave(32, dim=-2) / 2
    moves, moved = plane[0, 0].to(torch.float64), x.to(torch.float64).clone()
    scale = torch.finfo(torch.float16).max
    for start in range(0, WIDTH, block):
        end = start + block
        error = found[..., start:end] - moved[..., start:end]
        finite = torch.isfinite(error) & (half[..., start:end] < scale)
        noise = 1e-5 * (1e-9 + torch.nan_to_num(moved.abs(), 0, 0).amax())
        assert (error.abs() <= half[..., start:end] * (1 + 1e-5) + noise)[finite].all()
        moved[..., end:] += torch.where(finite, error, 0) @ moves[:, start:end, end:]
    bound = half + torch.nan_to_num(half, 0, 0) @ moves.abs()
    sound = torch.isfinite(found) & torch.isfinite(bound)
    assert ((found - x).abs() <= bound * (1 + 1e-5) + 1e-5 * (1e-9 + torch.nan_to_num(x.abs(), 0, 0, 0).amax()))[sound].all()
    assert torch.isfinite(found).sum() >= torch.isfinite(decoded(Kivi(bits).for_role(Role.KEY), x)).sum()


def test_the_residual_turns_away_from_the_subspace_as_lam_grows() -> None:
    """Over the channels that can still move, Qhat (delta) goes to nothing; over those quantized last, nothing can."""
    q = correlated(300, WIDTH, 6)
    left = []
    for lam in (0.0, 0.01, 0.1, 1.0, 10.0, 1e3, 1e6):
        scheme = keys_of(lam=lam, rank=6, subblock=16, unit=Unit.QUERIES)
        weight = lam * subspace.leading(subspace.gram(q), 6) / len(q)
        moves = subspace.moves(weight, 16)
        error = torch.randn(50, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        delta = torch.cat([error, error @ moves[:16, 16:]], dim=-1)
        directions = torch.linalg.eigh(subspace.leading(subspace.gram(q), 6))[1][:, -6:]
        left.append(float((delta @ directions).norm() / error.norm()))
        if lam:
            assert torch.allclose(calibrated(scheme, q)[0, 0, 0], moves.to(torch.float32), atol=1e-5)
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(left))
    assert left[0] > 0.1 and left[-1] < 1e-4 * left[0]


@pytest.mark.parametrize("bits", [2, 3])
def test_scores_err_less_on_correlated_queries_while_keys_may_err_more(bits: int) -> None:
    q = correlated(600, WIDTH, 6)
    x = normal(1, 2, 512, WIDTH)
    kivi, squat = Kivi(bits).for_role(Role.KEY), keys_of(bits=bits, rank=6, subblock=16)
    # Other queries of the same subspace than those that taught it.
    later = correlated(600, WIDTH, 6)[300:]
    plain = decoded(kivi, x) - x
    moved = decoded(squat, x, calibrated(squat, q[:300])) - x
    assert (moved @ later.mT).norm() < 0.4 * (plain @ later.mT).norm()
    assert moved.norm() > plain.norm()


def test_what_is_not_finite_stays_where_it_is() -> None:
    scheme = keys_of(rank=8)
    plane = calibrated(scheme, correlated(100, WIDTH, 8))
    x = normal(1, 2, 64, WIDTH)
    clean = decoded(scheme, x, plane)
    x[0, 0, 3, 2] = float("nan")
    dirty = decoded(scheme, x, plane)
    assert torch.isnan(dirty[0, 0, :32, 2]).all()
    assert torch.isfinite(dirty).sum() == dirty.numel() - 32
    assert torch.equal(dirty[0, 1], clean[0, 1]) and torch.equal(dirty[0, 0, 32:], clean[0, 0, 32:])
    queries = torch.randn(1, 2, 2, 10, WIDTH)
    queries[0, 1, 0, 3, 7] = float("inf")
    made = scheme.calibrate(queries, None)[0]
    assert made[0, 0, 0].any() and not made[0, 0, 1].any()


# --- learning ----------------------------------------------------------------------------------------------


def test_padding_does_not_teach() -> None:
    for shared in Subspace:
        scheme = keys_of(subspace=shared, subblock=16)
        q = torch.randn(2, 2, 3, 20, WIDTH)
        keep = torch.ones(2, 20, dtype=torch.bool)
        keep[0, :7], keep[1, 15:] = False, False
        q[0, ..., :7, :] = float("nan")
        made = scheme.calibrate(q, keep)[0]
        assert torch.allclose(made[0, 0], scheme.calibrate(q[:1, ..., 7:, :], None)[0][0, 0], atol=1e-5)
        assert made.shape[1] == (2 if shared is Subspace.ROW else 1)
        if shared is Subspace.ROW:
            assert torch.allclose(made[0, 1], scheme.calibrate(q[1:, ..., :15, :], None)[0][0, 0], atol=1e-5)


def test_normalised_does_not_grow_with_the_prompt_and_the_sources_does() -> None:
    q = correlated(100, WIDTH, 8)
    twice = torch.cat([q, q])
    normalised, paper = keys_of(subblock=32), Squat.paper(subblock=32).for_role(Role.KEY)
    assert torch.allclose(calibrated(normalised, q), calibrated(normalised, twice), atol=1e-5)
    assert calibrated(paper, twice).norm() > 1.2 * calibrated(paper, q).norm()
    for unit, alike in ((Unit.DIAGONAL, True), (Unit.QUERIES, False)):
        scheme = keys_of(subblock=32, unit=unit)
        assert torch.allclose(calibrated(scheme, q), calibrated(scheme, 10 * q), atol=1e-5) is alike
    assert dataclasses.astuple(Squat.paper())[-7:] == (1e-3, 5, 64, Unit.NONE, Subspace.BATCH, Queries.PRE, False)
    assert Squat.paper().rotate is Rotate.NONE


def test_learning_writes_the_planes_and_pads_a_short_mask() -> None:
    scheme = keys_of()
    q = torch.randn(1, 4, 10, WIDTH)
    plane = torch.full((1, 1, 2, WIDTH, WIDTH), float("nan"))
    calibrate_body(q, [plane], torch.ones(1, 6, dtype=torch.bool), scheme.spec())
    assert torch.equal(plane, scheme.calibrate(q[:, :, :6].unflatten(1, (2, 2)), None)[0])
    calibrate_body(q, [plane], torch.ones(1, 96, dtype=torch.bool), scheme.spec())
    assert torch.equal(plane, scheme.calibrate(q.unflatten(1, (2, 2)), None)[0])


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"window": 48}, "window to be a multiple of the group"), ({"lam": -0.1}, "lam to be a number from 0"),
        ({"lam": float("nan")}, "lam to be a number"), ({"lam": 1e9}, "lam to be a number"), ({"rank": 0}, "rank to be"),
        ({"subblock": 7}, "subblock to be"), ({"axis": "token"}, "axis to be auto or channel"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], found: str) -> None:
    with pytest.raises(BadOption, match=found):
        make("squat", **options)


def test_what_a_slot_cannot_hold() -> None:
    with pytest.raises(HeadDimNotDivisible, match="found head dim 80 and subblock 32"):
        keys_of(subblock=32, rotate=Rotate.NONE).check(slot(80))
    with pytest.raises(BadOption, match=r"rank to be at most the head dim \(64\), found 65"):
        keys_of(rank=65).check(slot())
    keys_of(rank=64).check(slot())


@pytest.mark.parametrize(("width", "asked", "used"), [(128, 64, 64), (64, 64, 32), (32, 64, 16), (32, 32, 16), (64, 32, 32), (96, 64, 48)])
def test_a_sub_block_is_at_most_half_of_the_head(width: int, asked: int, used: int) -> None:
    """What comes after the last block is what moves, so the source's 64 of 64 channels would move nothing."""
    q, x = correlated(100, width, 6), normal(1, 2, 64, width)
    large, small = (Squat.paper(subblock=channels, lam=1.0).for_role(Role.KEY) for channels in (asked, used))
    assert isinstance(large, Squat) and isinstance(small, Squat)
    large.check(slot(width))
    plane = calibrated(large, q)
    assert torch.equal(plane, calibrated(small, q)) and plane.any()
    for a, b in zip(large.encode(x, plane), small.encode(x, plane), strict=True):
        assert torch.equal(a, b)
    rule = large.minmax(width)
    assert rule is not None and rule.subblock == used and rule == small.minmax(width)


def test_a_strong_unnormalised_lam_is_warned_of() -> None:
    assert Squat.paper().warning is None and Squat(lam=5.0).warning is None
    assert "grow with the prompt" in str(Squat.paper(lam=0.1).warning)
    assert parse("squat(lam=0.1,unit=none)").warning


def test_no_bound_is_announced_where_queries_move_keys() -> None:
    assert keys_of().bound(slot()) is None
    assert keys_of(lam=0.0).bound(slot()) == Kivi().for_role(Role.KEY).bound(slot())


def test_bytes_of_the_plane() -> None:
    kivi = Kivi().for_role(Role.KEY).layout(slot(128))
    for scheme, extent in ((keys_of(), Extent.BATCH), (keys_of(subspace=Subspace.ROW), Extent.ROW)):
        layout = scheme.layout(slot(128))
        assert layout.planes[:-1] == kivi.planes and layout.planes[-1].extent is extent
        assert layout.bytes_per_page == kivi.bytes_per_page
    assert keys_of().layout(slot(128)).bytes_per_head == 128 * 128 * 4


# --- in graphs ---------------------------------------------------------------------------------------------

TEXT = "squat(subblock=16,rank=8,rotate=none,guard=False)"
TAUGHT: dict[str, Any] = {"subblock": 16, "rank": 8, "rotate": Rotate.NONE, "guard": False}


def attention(**sizes: int) -> IndexCopyAttribute:
    torch.manual_seed(0)
    return IndexCopyAttribute(**{"batch": 1, "heads": 2, "kv": 2, "dim": 64, "capacity": 160, **sizes})


def compiled(module: nn.Module, backend: Backend) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend, fullgraph=True)


def keys_store(module: Any) -> Store:
    """The store behind the key cache of a module."""
    (store,) = module.k_cache._kv.stores.values()
    return store


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_the_graph_that_fills_a_cache_teaches_it(count: int) -> None:
    """Prompts of one token, around the window, and over it; then steps over the end of a block."""
    module = attention()
    plain = copy.deepcopy(module)
    run = compiled(module, kvcompile.backend(TEXT, inner="eager", strict=True))
    x, total = torch.randn(1, count + 40, module.width), count + 40
    calls = [(0, count), *((at, at + 1) for at in range(count, total))]
    with torch.no_grad():
        found = [run(x[:, start:end], torch.arange(start, end)) for start, end in calls]
        # In the same pieces, since a matrix product rounds by its shape.
        parts = [plain.project(x[:, start:end])[:2] for start, end in calls]
        q, k = parts[0][0].transpose(1, 2), torch.cat([part[1] for part in parts], 1).transpose(1, 2)
        exact = plain(x[:, :count], torch.arange(count))
    store, scheme = keys_store(module), keys_of(**TAUGHT)
    plane = scheme.calibrate(q.unflatten(1, (2, -1)), None)[0]
    assert plane.any() and torch.allclose(store.planes[-1], plane, atol=1e-5)
    straight = Store(StoreSpec(store.spec.slot, scheme, scheme.layout(store.spec.slot)), 1, torch.device("cpu"), 3)
    straight.planes[-1].copy_(store.planes[-1])
    append_window_body(k, straight.planes, torch.arange(total)[None], None, scheme.spec())
    whole = total // 32 * 32
    assert torch.equal(decode(store, whole), decode(straight, whole))
    assert torch.allclose(found[0], exact, atol=1e-5)


def test_lam_zero_in_a_graph_is_kivi() -> None:
    results = []
    for text in ("kivi(rotate=k)", "squat(lam=0)"):
        module = attention()
        run = compiled(module, kvcompile.backend(text, inner="eager", strict=True))
        x = torch.randn(1, 100, module.width, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            run(x[:, :60], torch.arange(60))
            results.append(torch.cat([run(x[:, at : at + 1], torch.arange(at, at + 1)) for at in range(60, 100)]))
    assert torch.equal(*results)


@pytest.mark.parametrize("scheme", ["kivi", "squat(subblock=16,rank=8)", "certified", "int8", {"k": "int8", "v": "kivi"}], ids=str)
def test_a_buffer_starts_again_and_goes_back_without_a_reset(scheme: object) -> None:
    """Steps after a new start, or after going back, are those of a cache that never held anything else."""
    x = torch.randn(1, 110, 128, generator=torch.Generator().manual_seed(5))
    steps: dict[bool, list[torch.Tensor]] = {}
    for again in (False, True):
        module = attention()
        run = compiled(module, kvcompile.backend(scheme, inner="eager", strict=True))

        def call(first: int, last: int, run: Any = run) -> torch.Tensor:
            with torch.no_grad():
                return run(x[:, first:last], torch.arange(first, last))

        if again:
            # What is learned is learned from the first call, of the same tokens here.
            for first, last in ((0, 63), (63, 100), (100, 101), (101, 102)):
                call(first, last)
        call(0, 63)
        steps[again] = [call(at, at + 1) for at in (*range(63, 70), 64, 65)]
        assert module.k_cache._kv.behind == 66
    for a, b in zip(steps[False], steps[True], strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_starting_again_learns_again() -> None:
    module = attention()
    run = compiled(module, kvcompile.backend(TEXT, inner="eager", strict=True))
    x = torch.randn(2, 40, module.width)
    planes = []
    with torch.no_grad():
        for row in (0, 1, 0):
            run(x[row : row + 1], torch.arange(40))
            planes.append(keys_store(module).planes[-1].clone())
            module.k_cache.zero_()
            module.v_cache.zero_()
    assert torch.equal(planes[0], planes[2]) and not torch.equal(planes[0], planes[1])


def test_queries_of_all_heads_of_a_group_teach_their_kv_head() -> None:
    torch.manual_seed(0)
    module = TrilMask(batch=2, heads=4, kv=2, dim=64, capacity=96)
    run = compiled(module, kvcompile.backend(f"{TEXT[:-1]},subspace=row)", inner="eager", strict=True))
    x = torch.randn(2, 40, module.width)
    with torch.no_grad():
        run(x, torch.arange(40))
        q = module.project(x)[0].transpose(1, 2)
    plane = keys_of(**TAUGHT, subspace=Subspace.ROW).calibrate(q.unflatten(1, (2, 2)), None)[0]
    assert torch.allclose(keys_store(module).planes[-1], plane, atol=1e-5)


def test_a_filled_cache_has_no_queries_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    results, text = [], ""
    for scheme in (TEXT, "kivi"):
        module = attention()
        x = torch.randn(1, 80, module.width, generator=torch.Generator().manual_seed(5))
        backend = kvcompile.backend(scheme, inner="eager", strict=True)
        run = compiled(module, backend)
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="kvcompile"):
            module(x[:, :60], torch.arange(60))
            results.append(torch.cat([run(x[:, at : at + 1], torch.arange(at, at + 1)) for at in range(60, 80)]))
        text = text or str(backend.report())
    assert torch.equal(*results), "the codes are kivi's"
    said = [record.getMessage() for record in caplog.records if "squat is calibrated by the queries" in record.getMessage()]
    assert len(said) == 1 and "arrived filled" in said[0] and "e2e_layers.py" in said[0]
    assert "1 live key store never saw the queries" in text and "lam=0" in text


def test_nothing_is_said_where_queries_were_seen(caplog: pytest.LogCaptureFixture) -> None:
    module = attention()
    backend = kvcompile.backend(TEXT, inner="eager", strict=True)
    run = compiled(module, backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="kvcompile"):
        run(torch.randn(1, 40, module.width), torch.arange(40))
        run(torch.randn(1, 1, module.width), torch.arange(40, 41))
    assert not caplog.records and "never saw" not in str(backend.report())


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_teaching_equals_the_eager_one(inner: str) -> None:
    """The same planes. A product rounds by what it is fused with, so a key within rounding of a tie may fall to either side."""
    kept = []
    for way in ("eager", inner):
        module = attention()
        run = compiled(module, kvcompile.backend(TEXT, inner=way, strict=True))
        with torch.no_grad():
            run(torch.randn(1, 75, module.width, generator=torch.Generator().manual_seed(5)), torch.arange(75))
        kept.append(keys_store(module).planes)
    (codes, scales, *_, plane), (other_codes, other_scales, *_, other_plane) = kept
    assert plane.any() and torch.allclose(plane, other_plane, atol=1e-5)
    assert (codes != other_codes).to(torch.float32).mean() < 0.01
    assert ((scales - other_scales).abs() > 0.01 * scales).to(torch.float32).mean() < 0.01


@pytest.mark.parametrize(("static", "guarded"), [(True, False), (False, False), (True, True)], ids=["static", "dynamic", "guarded"])
def test_padded_rows_teach_themselves(static: bool, guarded: bool) -> None:
    """Batch 2 with left padding equals two single runs where every row has a subspace of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    # The queries of the first kv head have few directions; those of the other have none that a guard would follow.
    model.model.layers[0].self_attn.q_proj.weight.data[:64] = torch.randn(64, 2) @ torch.randn(2, 128) / 4
    ids, mask = torch.randint(0, 100, (2, 45)), torch.ones(2, 45, dtype=torch.int64)
    mask[1, :13] = 0
    planes = []
    for rows, first in ((slice(0, 2), 0), (slice(0, 1), 0), (slice(1, 2), 13)):
        cache = StaticCache(config=config, max_cache_len=64) if static else DynamicCache(config=config)
        run = compiled(model, kvcompile.backend(f"squat(subspace=row,rank=4,guard={guarded})", inner="eager", strict=True))
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            run(input_ids=ids[rows, first:], attention_mask=mask[rows, first:], position_ids=position[rows, first:], past_key_values=cache)
        (store,) = cache.layers[0].keys._kv.stores.values()
        planes.append(store.planes[-1])
    assert planes[0].any() and torch.allclose(planes[0], torch.cat(planes[1:], 1), atol=1e-5)
    assert planes[0].flatten(3).any(-1).tolist() == [[[True, not guarded]] * 2]


@pytest.mark.parametrize("queries", ["pre", "post", "distances"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_keys_before_rope_learn_from_queries_before_rope(queries: str, padded: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(0, 100, (2, 45)), torch.ones(2, 45, dtype=torch.int64)
    mask[1, : 13 * padded] = 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = StaticCache(config=config, max_cache_len=64)
    run = compiled(model, kvcompile.backend(f"squat-pre(subspace=row,rank=4,guard=False,queries={queries})", inner="eager", strict=True))
    with torch.no_grad():
        run(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache)
        layer = model.model.layers[0]
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))
        q = layer.self_attn.q_proj(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, position)
        if queries == "post":
            q, _ = apply_rotary_pos_emb(q, q, cos, sin)
    (store,) = cache.layers[0].keys._kv.stores.values()
    scheme = parse(store.spec.scheme.spec())
    assert isinstance(scheme, Squat) and scheme.pre_rope
    told = schemes.Prompt(angles=(cos, sin, False)) if queries == "distances" else schemes.Prompt()
    expected = scheme.calibrate(q.unflatten(1, (2, 2)), mask.bool(), told)[0]
    assert expected.any() and torch.allclose(store.planes[-1], expected, atol=1e-5)


def test_squat_pre_is_a_name() -> None:
    assert make("squat-pre") == Squat(pre_rope=True) == parse("squat-pre") and parse("squat-pre(rank=5)") == Squat(pre_rope=True, rank=5)
    assert not Squat().calibrates_before_rope and not Squat(pre_rope=True, queries=Queries.POST).calibrates_before_rope
    assert Squat().rotate is Rotate.K and Squat(pre_rope=True).rotate is Rotate.NONE
    with pytest.raises(BadOption, match="rotate to be none where keys are stored before RoPE"):
        Squat(pre_rope=True, rotate=Rotate.K)
    with pytest.raises(UnknownScheme, match="did you mean 'squat-pre'"):
        make("squat-pree")


def test_the_sources_settings_have_names() -> None:
    """Rank, lam and sub-block as its appendix E.2 lists them; group, window and bits are its and kivi's defaults."""
    listed = {
        "squat-paper": (5, 1e-3, 64), "squat-pre-paper": (5, 1e-3, 64),
        "squat-longbench-llama-2-7b": (40, 1e-3, 64), "squat-pre-longbench-llama-2-7b": (5, 1e-3, 32),
        "squat-longbench-llama-3.1-8b": (10, 5e-4, 64), "squat-pre-longbench-llama-3.1-8b": (60, 5e-4, 32),
        "squat-longbench-mistral-7b": (5, 1e-3, 64), "squat-pre-longbench-mistral-7b": (20, 5e-4, 64),
    }
    assert set(listed) == {name for name in schemes.settings() if name not in {"squat-pre"} and name.startswith("squat")}
    for name, numbers in listed.items():
        made = parse(name)
        assert isinstance(made, Squat) and (made.rank, made.lam, made.subblock) == numbers and made.unit is Unit.NONE, name
        assert made.rotate is Rotate.NONE and made.queries is Queries.PRE and not made.guard, name
        assert (made.bits, made.group, made.window, made.pre_rope) == (2, 32, 32, "-pre" in name)
    assert parse("squat-longbench-llama-3.1-8b(window=128)") == Squat.longbench("llama-3.1-8b", window=128)
    with pytest.raises(BadOption, match=r"one of llama-2-7b, llama-3\.1-8b, mistral-7b, found 'llama'"):
        Squat.longbench("llama")


def test_rows_that_move_keep_or_take_their_plane() -> None:
    """Beam search exchanges rows: a shared plane stays, a row's own goes with it."""
    for shared in Subspace:
        scheme = keys_of(subspace=shared, subblock=16)
        store = Store(StoreSpec(slot(), scheme, scheme.layout(slot())), 2, torch.device("cpu"), 2)
        store.planes[-1].copy_(scheme.calibrate(torch.randn(2, 2, 1, 30, WIDTH), None)[0])
        turned = store.select_rows(torch.tensor([1, 1, 0]))
        if shared is Subspace.BATCH:
            assert torch.equal(turned.planes[-1], store.planes[-1])
        else:
            assert torch.equal(turned.planes[-1], store.planes[-1][:, [1, 1, 0]])
        store.clear()
        assert not store.planes[-1].any()
