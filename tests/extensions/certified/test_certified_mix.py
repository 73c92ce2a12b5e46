"""Values on tensor cores: the kernel ``weighted_values`` against float64 and its bound, and the model of the bound against adversaries."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from interpreted import interpreted

from kvcompile.extensions.certified.scheme import BLOCK
from kvcompile.lowering.certificate.head_bounds import CHAIN
from kvcompile.schemes.asymmetric import Axis, Kivi
from kvcompile.schemes.certificate import bounds

UNIT = 2.0**-24


class Case(NamedTuple):
    """Sums of one kv head's rows over tokens, in splits, of pages of PAGE rows."""

    kind: str = "gaussian"
    group: int = 16
    width: int = 64
    rows: int = 4
    page: int = 64
    tokens: int = 300
    splits: int = 2
    whole: torch.dtype | None = None
    """The dtype of values that are no codes."""


def values_of(case: Case, draw: torch.Generator) -> torch.Tensor:
    """Values [1, 1, tokens, width], whole pages of them: gaussian, at both ends of float16, or such that sums cancel."""
    whole = max(64, case.page)
    padded = -(-case.tokens // whole) * whole
    v = torch.randn(1, 1, padded, case.width, generator=draw)
    if case.kind == "large":
        v *= 10000
    elif case.kind == "small":
        v *= 2.0**-17
    elif case.kind == "cancelling":
        v = torch.where(torch.arange(padded) % 2 == 0, 1.0, -1.0)[:, None] * (3 + v[:, :, :1])
    elif case.kind == "mixed":
        v *= 10.0 ** (8 * torch.rand(1, 1, padded, 1, generator=draw) - 5)
    return v


def check(case: Case, device: str = "cpu", seed: int = 0) -> float:
    """The largest distance of ``weighted_values`` from float64 relative to the bound, which must not be above one."""
    from kvcompile.extensions.certified.kernels.weighted_values import turn_of, weighted_values

    draw = torch.Generator().manual_seed(seed)
    scheme = Kivi(bits=4, group=case.group, window=max(case.group, BLOCK), axis=Axis.TOKEN)
    v = values_of(case, draw)
    codes, steps, zeros = scheme.encode(v)
    padded, rows, width = v.shape[2], case.rows, case.width
    nibbles = codes.to(torch.int64)
    code = torch.cat([nibbles & 15, nibbles >> 4], -1).to(torch.float64)
    spread = [x.to(torch.float64).repeat_interleave(case.group, -1) for x in (steps, zeros)]
    decoded = (code * spread[0] + spread[1]).to(torch.float32).to(torch.float64)[0, 0]
    if case.whole is not None:
        codes = steps = zeros = v.to(case.whole)
        decoded = codes.to(torch.float64)[0, 0]
    blocks, turn = padded // BLOCK, turn_of(case.page, case.width)
    share = -(-blocks // (case.splits * turn // BLOCK)) * (turn // BLOCK)
    logits = 10 * torch.randn(rows, padded, generator=draw)
    if case.kind == "cancelling":
        logits *= 1e-3
    taken = torch.rand(rows, blocks, generator=draw) < 0.2
    first = 7
    top = logits.amax(-1)
    seen = (torch.arange(padded) >= first) & (torch.arange(padded) < case.tokens) & ~taken.repeat_interleave(BLOCK, 1)

    def paged(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, case.page)).permute(2, 0, 1, 3, 4).contiguous().to(device)

    planes = [paged(x) for x in (codes, steps, zeros)]
    at = torch.tensor([[case.tokens - 1, first, case.tokens]], dtype=torch.int32, device=device)
    out = torch.full((case.splits, rows, width), float("nan"), device=device)
    tile = min(4, 1 << (rows - 1).bit_length())
    launched: dict[str, Any] = dict(num_warps=1) if device == "cuda" else {}
    # One query of several heads: rows see the same positions.
    weighted_values[(case.splits, 1, -(-rows // tile))](
        *planes, logits.to(device), top.to(device), taken.to(torch.int8).to(device), at, out, *planes[0].stride()[:4],
        *planes[1].stride()[:3], blocks, share, DV=width, GROUP=case.group, K=1, G=rows, S=1, S2=1, TILE=tile, PAGE=case.page, T=turn,
        FULL=case.whole is not None, PACKED=device == "cuda", **launched,
    )
    gap = (logits - top[:, None]).to(torch.float64)
    weight = torch.where(seen, torch.exp(gap), 0)
    found, exact = out.to("cpu").to(torch.float64).sum(0), weight @ decoded
    chain = CHAIN + share + 4 + bounds.TENSOR_STEP * turn // BLOCK
    size = torch.linalg.vector_norm(decoded, dim=-1)
    if case.whole is None:
        chain, size = chain + bounds.HALF_STEP, size + math.sqrt(width) * bounds.HALF_TINY * 2**12
    bound = ((weight * (chain + 2 * gap.abs()) * UNIT + torch.where(seen, 2.0**-48, 0)) * size).sum(-1)
    ratio = torch.linalg.vector_norm(found - exact, dim=-1) / bound
    assert (ratio <= 1).all(), (case, ratio)
    return float(ratio.max())


KINDS = ("gaussian", "large", "small", "cancelling", "mixed")
CASES = (
    *(Case(kind) for kind in KINDS), Case(group=8, width=16), Case(group=8, width=128), Case(group=32), Case(group=64, width=128, rows=1),
    Case(rows=7, page=16, splits=1), Case(width=256, rows=3), Case(rows=2, page=32, splits=3), Case(rows=16, page=128, tokens=600),
    *(Case(kind, whole=torch.bfloat16) for kind in ("gaussian", "cancelling", "mixed")),
    Case("small", width=128, rows=7, whole=torch.float16),
)


def check_all() -> None:
    """Everything that needs the interpreter."""
    for seed, case in enumerate(CASES):
        check(case, seed=seed)


@pytest.mark.timeout(600)
def test_sums_are_within_their_bound() -> None:
    pytest.importorskip("triton")
    interpreted(check_all)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_of_a_device_are_within_their_bound(case: Case) -> None:
    """What no manual promises: sums of tensor cores, and that they take subnormal float16 numbers for what they are."""
    closest = max(check(case._replace(tokens=tokens), "cuda", seed) for seed in range(5) for tokens in (300, 5000))
    assert closest > 0


def cut(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Cut off below the last of 24 places of numbers with that exponent."""
    place = np.exp2(exponent - 23.0)
    return np.trunc(x / place) * place


def worst_tensor_core(a: np.ndarray, b: np.ndarray, total: np.ndarray, at_once: int) -> np.ndarray:
    """A sum with products, ``at_once`` in a step: all aligned to the largest in magnitude and cut off, then the sum of those cut off."""
    products = a * b
    for first in range(0, a.shape[-1], at_once):
        terms = np.concatenate([total[..., None], products[..., first : first + at_once]], -1)
        largest = np.frexp(np.abs(terms).max(-1, keepdims=True))[1] - 1.0
        total = cut(terms, largest).sum(-1)
        total = cut(total, np.frexp(total)[1] - 1.0)
    return total


@pytest.mark.parametrize("at_once", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", ["like", "gaussian", "cancelling", "falling", "rising"])
def test_what_tensor_cores_cut_off_is_within_a_step(kind: str, at_once: int) -> None:
    """Devices differ in how many products they add at once; a step of the bound covers the most chained one of them too."""
    rng = np.random.default_rng(at_once)
    closest = 0.0
    for _ in range(200):
        a, b = (rng.normal(size=(64, 16)).astype(np.float16).astype(np.float64) for _ in range(2))
        if kind == "like":
            a, b = np.abs(a) + 1, np.abs(b) + 1
        if kind == "cancelling":
            a[:, 1::2], b[:, 1::2] = a[:, ::2], -b[:, ::2]
        if kind in ("falling", "rising"):
            order = np.arange(16) if kind == "falling" else np.arange(16)[::-1]
            a = np.abs(a) * np.exp2(-order / 2.0)
            a = a.astype(np.float16).astype(np.float64)
        total = rng.normal(size=64).astype(np.float32).astype(np.float64) * 10 ** rng.uniform(-3, 3)
        found = worst_tensor_core(a, b, total, at_once)
        magnitude = np.abs(total) + np.abs(a * b).sum(-1)
        closest = max(closest, float((np.abs(found - total - (a * b).sum(-1)) / (bounds.TENSOR_STEP * UNIT * magnitude)).max()))
    assert 0 < closest <= 1, closest


def test_a_turn_in_the_worst_order_is_within_the_chain() -> None:
    """Every product positive, so that all cuts point one way: four steps and no more."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        a, b = ((1 + rng.random(size=(64, 64))).astype(np.float16).astype(np.float64) for _ in range(2))
        total = np.zeros(64)
        for first in range(0, 64, 16):
            total = worst_tensor_core(a[:, first : first + 16], b[:, first : first + 16], total, 1)
        exact = (a * b).sum(-1)
        assert (np.abs(total - exact) <= 4 * bounds.TENSOR_STEP * UNIT * exact).all()
        assert (total < exact).all()


def test_weights_are_two_tf32_numbers() -> None:
    """Within 4 units and less than 2^-130, of what tensor cores take as it is: ten bits behind the leading one."""
    weight = torch.cat([torch.rand(20000), 2.0 ** (-120 * torch.rand(20000)), torch.tensor([1.0, 0.0])])

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((x.view(torch.int32) + 4096) & -8192).view(torch.float32)

    high = near(weight)
    low = near(weight - high)
    assert ((high.double() + low.double() - weight.double()).abs() <= 4 * UNIT * weight + 2.0**-136).all()
    assert not ((high.view(torch.int32) | low.view(torch.int32)) & 8191).any()


def test_weights_are_two_float16_numbers() -> None:
    """Within 4 units of it and 2^-50, whatever the weight."""
    weight = torch.cat([torch.rand(20000), 2.0 ** (-140 * torch.rand(20000)), torch.tensor([1.0, 0.0])])
    raised = weight * 2.0**14
    first = raised.to(torch.float16)
    second = ((raised - first.to(torch.float32)) * 2.0**11).to(torch.float16)
    found = (first.to(torch.float64) + second.to(torch.float64) * 2.0**-11) * 2.0**-14
    assert ((found - weight.to(torch.float64)).abs() <= 4 * UNIT * weight + 2.0**-50).all()
    assert torch.isfinite(first).all() and torch.isfinite(second).all()


def test_values_decoded_in_float16_are_within_half_a_step() -> None:
    """One rounding, with float32's before it or not, against what the scheme decodes."""
    draw = torch.Generator().manual_seed(0)
    for scale in (1e-7, 1e-4, 1.0, 3000.0):
        step = (torch.rand(4096, generator=draw) * scale).to(torch.float16)
        zero = (torch.randn(4096, generator=draw) * 8 * scale).to(torch.float16)
        code = torch.randint(0, 16, (4096,), generator=draw)
        exact = code * step.to(torch.float64) + zero.to(torch.float64)
        decoded = exact.to(torch.float32)
        for found in (exact.to(torch.float16), decoded.to(torch.float16)):
            apart = (found.to(torch.float64) - decoded.to(torch.float64)).abs()
            fine = apart <= (bounds.HALF_STEP - 32) * UNIT * decoded.abs() + bounds.HALF_TINY * (1 + 2.0**-9)
            assert (fine | ~torch.isfinite(found)).all()
