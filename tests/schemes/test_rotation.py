"""Rotated channels: the matrix, what it leaves as it was, what it refuses, and the eigenvectors that may stand before it."""

from __future__ import annotations

import pytest
import torch

from kvcompile.errors import BadOption, HeadDimNotDivisible
from kvcompile.extensions.squat import subspace as algebra
from kvcompile.lowering.ops.operations import append_body, rotate_channels
from kvcompile.schemes import Scheme, make, parse
from kvcompile.schemes.low_bit import LowBit
from kvcompile.schemes.rotation import ORDERS, Rotation, rotate, rotation_matrix, signs, unrotate
from kvcompile.testing.samples import normal, slot
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

ROTATED = ("int4", "int8", "fp8", "nf4", "kivi", "squat", "normed")
EXACT = torch.float64


def plane(width: int, order: int, heads: int = 2) -> torch.Tensor:
    """What a random rotation adds to the Hadamard matrix, [1, K, D, D]."""
    random = torch.randn(1, heads, width, width, dtype=EXACT, generator=torch.Generator().manual_seed(3))
    return torch.linalg.qr(random).Q - rotation_matrix(width, order, torch.zeros(width, width, dtype=EXACT))


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_hadamard_matrices(order: int) -> None:
    matrix = signs(order).to(EXACT)
    assert torch.equal(matrix.abs(), torch.ones_like(matrix)) and torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, order * torch.eye(order, dtype=EXACT))


@pytest.mark.parametrize(("width", "order", "own"), [(64, 64, False), (80, 16, False), (96, 32, False), (256, 128, False), (64, 32, True)])
def test_scores_and_tokens_are_what_they_were(width: int, order: int, own: bool) -> None:
    q, k = (torch.randn(3, heads, 5, width, dtype=EXACT, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2))
    added = plane(width, order) if own else None
    turned_q, turned_k = (rotate(x, order, added) for x in (q, k))
    scores, expected = (a @ b.repeat_interleave(3, 1).mT for a, b in ((turned_q, turned_k), (q, k)))
    assert torch.allclose(scores, expected, atol=1e-12) and not torch.allclose(turned_k, k, atol=0.1)
    assert torch.allclose(unrotate(turned_k, order, added), k, atol=1e-12)
    # One token is summed, several are multiplied: the operation of a graph takes either way.
    one = rotate_channels(k[:, :, :1], order, None if added is None else added.unsqueeze(0), False)
    assert torch.allclose(one, turned_k[:, :, :1], atol=1e-12)


def test_an_outlier_spreads_over_its_block_and_nothing_else() -> None:
    x = torch.zeros(1, 1, 1, 96)
    x[..., 40] = 8.0
    found = rotate(x, 32, None)[0, 0, 0]
    assert torch.allclose(found[32:64].abs(), torch.full((32,), 8 / 32**0.5)) and not found[:32].any() and not found[64:].any()
    for poison in (float("nan"), float("inf"), float("-inf")):
        x[..., 40] = poison
        found = rotate(x, 32, None)[0, 0, 0]
        assert not found[32:64].isfinite().any() and found[:32].isfinite().all() and found[64:].isfinite().all()
        assert not rotate(x, 32, torch.zeros(1, 1, 96, 96)).isfinite().any()


def test_zeros_stay_zeros() -> None:
    """Places that nobody wrote, and padding, decode to zero however channels are rotated."""
    assert not unrotate(torch.zeros(1, 1, 3, 64), 64, None).any()


@pytest.mark.parametrize(("width", "order", "found"), [(64, 0, 64), (80, 0, 16), (96, 0, 32), (128, 0, 128), (256, 0, 128), (128, 32, 32)])
def test_the_largest_block_that_fits_is_the_default(width: int, order: int, found: int) -> None:
    assert make("int8", rotate="k", order=order).rotation(slot(head_dim=width)) == Rotation(found)


def test_heads_that_no_block_divides_are_refused() -> None:
    for text, width in (("int8(rotate=k)", 72), ("int8(rotate=kv,order=64)", 96), ("kivi(rotate=k)", 40)):
        with pytest.raises(HeadDimNotDivisible, match=rf"the order of a rotation divides, found head dim {width}"):
            parse(text).check(slot(head_dim=width))


@pytest.mark.parametrize("name", ROTATED)
def test_which_halves_are_rotated(name: str) -> None:
    scheme = parse(name)
    assert isinstance(scheme, LowBit)
    for halves, rotated in (("none", set()), ("k", {Role.KEY}), ("kv", set(Role))):
        made = make(name, rotate=halves)
        assert {role for role in Role if made.for_role(role).rotation(slot(role=role)) is not None} == rotated


def test_keys_before_rope_and_latents_are_not_rotated_alone() -> None:
    with pytest.raises(BadOption, match="leave pre_rope or rotate out"):
        parse("kivi(pre_rope=True,rotate=k)")
    with pytest.raises(BadOption, match="pass rotate=kv"):
        parse("int8(rotate=k)").check_pair(parse("int8"), parse("int8"), True, "model.layers.0")


@pytest.mark.parametrize("name", ["int4", "int8", "kivi", "normed"])
def test_loud_channels_cost_less_where_they_are_rotated(name: str) -> None:
    """Of queries and keys with loud channels, scores by codes are nearer to the exact ones; that keys are nearer proves little."""
    spec, k, q = slot(head_dim=64), normal(1, 2, 128, 64, seed=1), normal(1, 2, 64, 64, seed=2)
    k[..., 5] += 30.0

    def error(scheme: Scheme) -> torch.Tensor:
        rotation = scheme.rotation(spec)
        turned = k if rotation is None else rotate(k, rotation.order, None)
        found = scheme.decode(scheme.encode(turned), spec)
        found = found if rotation is None else unrotate(found, rotation.order, None)
        return (q @ (found - k).mT).norm()

    plain, rotated = (make(name, rotate=rotate, **({"granularity": "token"} if name.startswith("int") else {})).for_role(Role.KEY)
                      for rotate in ("none", "k"))
    if name in {"int4", "int8"}:
        assert error(rotated) < 0.8 * error(plain)
    else:
        # Per-channel scales hold a loud channel by themselves; rotated, every channel is as wide as any other.
        assert error(rotated) < 1.5 * error(plain)


def test_eigenvectors_are_orthonormal_and_order_what_queries_look_at() -> None:
    generator = torch.Generator().manual_seed(0)
    for width, tokens in ((16, 200), (64, 500), (128, 40)):
        spread, turned = torch.logspace(0, -2, width), torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        q = torch.randn(2, 3, tokens, width, generator=generator) * spread @ turned
        gram = algebra.gram(q)
        found = algebra.eigenvectors(gram)
        assert (found.mT @ found - torch.eye(width, dtype=EXACT)).abs().max() < 1e-12
        inside = found.mT @ gram.to(EXACT) @ found
        weight = inside.diagonal(dim1=-2, dim2=-1)
        # What is left outside of the diagonal couples directions of nearly equal weight only.
        rest = torch.linalg.matrix_norm(inside - torch.diag_embed(weight)) / torch.linalg.matrix_norm(inside)
        assert (rest < 0.1).all() and (weight[..., : width // 8].sum(-1) > 0.99 * torch.linalg.eigvalsh(gram.to(EXACT))[
            ..., -(width // 8) :].sum(-1)).all()
    for nothing in (torch.zeros(1, 1, 32, 32), torch.ones(1, 1, 32, 32)):
        found = algebra.eigenvectors(nothing)
        assert (found.mT @ found - torch.eye(32, dtype=EXACT)).abs().max() < 1e-12


@pytest.mark.parametrize("turn", ["queries", "both"])
def test_a_rotation_by_queries_is_one_whatever_they_were(turn: str) -> None:
    scheme, spec = make("normed", turn=turn).for_role(Role.KEY), slot(head_dim=64)
    rotation = scheme.rotation(spec)
    assert rotation is not None and rotation.plane == "rotation"
    q = normal(2, 2, 3, 50, 64)
    keep = torch.ones(2, 50, dtype=torch.bool)
    keep[0, :20] = False
    loud = torch.where(keep[:, None, None, :, None], q, 1e6)
    (added,), (masked,) = scheme.calibrate(q[:, :, :, 20:], None), scheme.calibrate(loud, keep)
    assert torch.equal(added, masked), "padding taught something"
    found = rotation_matrix(64, rotation.order, added[0].to(EXACT))
    assert (found.mT @ found - torch.eye(64, dtype=EXACT)).abs().max() < 1e-5
    for broken in (torch.full_like(q, float("nan")), torch.where(q > 3, float("inf"), q)):
        assert not scheme.calibrate(broken, None)[0].any(), "without finite queries it is the Hadamard matrix"


@pytest.mark.parametrize("name", ["int4(rotate=kv)", "fp8(rotate=k)"])
def test_nan_never_becomes_a_number_on_its_way_through_a_rotation(name: str) -> None:
    scheme, spec = parse(name), SlotSpec(1, 64, torch.float32, Role.KEY)
    rotation = scheme.rotation(spec)
    assert rotation is not None
    x = normal(1, 1, 3, 64)
    x[0, 0, 1, 7] = float("nan")
    planes = [scheme.empty(plane, spec, 1, 1) for plane in scheme.layout(spec).planes[:2]]
    append_body(rotate(x, rotation.order, None), planes, torch.arange(3)[None], name)
    found = unrotate(scheme.decode([plane[0] for plane in planes], spec)[:, :, :3], rotation.order, None)
    assert not found[0, 0, 1].isfinite().any() and found[0, 0, [0, 2]].isfinite().all()
