"""What tensor cores may round in logits by codes, against what ``bounds.CODED`` allows: a model of them that cuts off whatever it can."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvcompile.extensions.certified.kernels.key_scores import BACK, LEAST_STEP, ROOM
from kvcompile.extensions.certified.scheme import BLOCK, Certified
from kvcompile.extensions.certified.sizes import RADIUS
from kvcompile.lowering.certificate.bound_printer import aten
from kvcompile.schemes.certificate import bounds
from kvcompile.types import Role

F32, F64, SCALE, ROWS = torch.float32, torch.float64, 0.11, 4
coded = aten(bounds.CODED)


def cut_off(x: torch.Tensor, exponent: torch.Tensor, up: bool) -> torch.Tensor:
    """float64 to multiples of 2^(exponent - 23), towards zero, or (``up``) all downwards."""
    quantum = torch.exp2(exponent - 23)
    return (torch.floor if up else torch.trunc)(x / quantum) * quantum


def tensor_cores(a: torch.Tensor, b: torch.Tensor, up: bool) -> torch.Tensor:
    """a [M, K] @ b [K, N] of float16 numbers: 16 products and the sum so far aligned to the largest, cut off, added, cut off again."""
    products = a.to(F64)[:, :, None] * b.to(F64)[None]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=F64)
    for first in range(0, a.shape[1], 16):
        addends = torch.cat([products[:, first : first + 16], total[:, None]], dim=1)
        largest = torch.floor(torch.log2(addends.abs().amax(1).clamp(min=2.0**-200)))
        total = cut_off(addends, largest[:, None], up).sum(1)
        total = cut_off(total, torch.floor(torch.log2(total.abs().clamp(min=2.0**-200))), up)
    return total.to(F32)


def octave(x: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel has it."""
    exponent = ((x.view(torch.int32) >> 23) & 255).clamp(least, 253)
    return (exponent << 23).view(F32), ((254 - exponent) << 23).view(F32)


def scored(q: torch.Tensor, codes: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.key_scores.score_codes`` of one block on such tensor cores, [16, rows], and its CHANNELS [rows]; q float32 [rows, D]."""
    D = q.shape[1]
    size, reciprocal = octave(q.abs().amax(1), 1)
    q = (q * reciprocal[:, None]).T
    most, of_steps = octave(step.amax(), LEAST_STEP.value)
    scaled = step * (of_steps * ROOM.value)
    words = (codes.to(torch.int32) + 128).to(F64) * 2.0**-24
    both = torch.zeros(BLOCK, ROWS)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        w = q[half] * scaled[half, None]
        high = w.to(torch.float16)
        low = (w - high.to(F32)).to(torch.float16)
        # One after the other is one chain longer than the kernel's, whose two halves share an accumulator: both are allowed for.
        both = both + (tensor_cores(words[:, half], high, up) + tensor_cores(words[:, half], low, up))
    point = 2.0**28 / D

    def fixed(weights: torch.Tensor, x: torch.Tensor, more: int) -> torch.Tensor:
        most, scale = octave(x.abs().amax(), 1)
        products = weights * (x * scale * point)[:, None]
        total = torch.round(products[::2] + products[1::2]).to(torch.int64).sum(0) + more
        assert (total.abs() < 2**31).all()
        return total.to(F32) * (most / point)

    of_low = fixed(q, zero - 128 * step, 0)
    reach = fixed(q.abs(), step * RADIUS[0] + zero.abs() * RADIUS[1] + RADIUS[2], D) * size
    return (both * (most * BACK.value) + of_low) * (size * SCALE), reach


def one_way(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(ROWS, D) + 1, torch.rand(1, 1, BLOCK, D) + 3


def spread(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, D), torch.randn(1, 1, BLOCK, D)


def offsets(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, D), torch.randn(1, 1, BLOCK, D) + 100 * torch.randn(D)


def outliers(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.exp(4 * torch.randn(D))
    return torch.randn(ROWS, D) / wide, torch.randn(1, 1, BLOCK, D) * wide


def tiny(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, D) * 1e20, torch.randn(1, 1, BLOCK, D) * 1e-37


def huge(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, D) * 1e-30, torch.randn(1, 1, BLOCK, D) * 1e35


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("D", [32, 128])
@pytest.mark.parametrize("draw", [one_way, spread, offsets, outliers, tiny, huge])
def test_a_logit_on_cutting_tensor_cores_stays_within_its_bound(
    draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]], D: int, up: bool
) -> None:
    torch.manual_seed(D)
    nearest = 0.0
    for _ in range(4):
        q, k = draw(D)
        codes, step, zero, *_ = Certified().for_role(Role.KEY).encode(k)
        codes, step, zero = codes[0, 0], step[0, 0, 0], zero[0, 0, 0]
        decoded = codes.to(F64) * step.to(F64) + zero.to(F64)
        exact = decoded @ q.to(F64).T * SCALE
        channels = q.abs().to(F64) @ (step * RADIUS[0] + zero.abs() * RADIUS[1] + RADIUS[2]).to(F64)
        # Without a residual nothing but arithmetic is left.
        allowed = coded(
            cap=0.0, channels=channels, kappa=0.0, mu=decoded.norm(dim=1).max(), peak=0.0, query_norm=q.to(F64).norm(dim=1), scale=SCALE,
            terms=D + 8.0,
        )
        logits, reach = scored(q, codes, step, zero, up)
        assert (reach * (1 + 2.0**-12) >= channels).all()
        apart = (logits.to(F64) - exact).abs()
        assert (apart <= allowed).all(), (apart / allowed).max()
        nearest = max(nearest, float((apart / allowed).max()))
    assert math.isfinite(nearest)
    assert nearest > 1e-3 or draw is not one_way, "a bound that nothing comes near to proves little"


def test_a_code_is_the_number_that_tensor_cores_take_its_bits_for() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int32)
    bits = ((codes & 255) ^ 128).to(torch.int16).view(torch.float16)
    assert torch.equal(bits.to(F64) * 2.0**24, codes.to(F64) + 128)
