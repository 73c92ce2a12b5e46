"""The hard quantizer: its forward is the served one, its gradients are the source's, by hand and against smoothed bins."""

from __future__ import annotations

import pytest
import torch
from learned_tables import random_table

from kvcompile.extensions.beyond.learning.projection import isotonic, ordered
from kvcompile.extensions.beyond.learning.quantizer import (
    HardQuantizer,
    QuantizerConfig,
    compiled,
    hard_quantize,
    level_mapped,
    rectified,
    table_gradients,
)
from kvcompile.extensions.beyond.tables import Table, uniform_table
from kvcompile.lowering.ops.operations import read_back_body
from kvcompile.schemes import Beyond
from kvcompile.testing.samples import normal

pytestmark = pytest.mark.usefixtures("one_thread")

RULE = QuantizerConfig(4, torch.float16, 0.009 * 15)


def quantized(x: torch.Tensor, table: Table, rule: QuantizerConfig = RULE) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The tokens through the quantizer, and its operands that take gradients: tokens, levels, left, right."""
    nothing = torch.zeros_like(table.thresholds)
    leaves = [part.clone().requires_grad_() for part in (x, table.levels, nothing, nothing)]
    tokens, levels, left, right = leaves
    return HardQuantizer.apply(tokens, levels, table.thresholds, left, right, rule), leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_forward_is_what_a_store_gives_back(bits: int, dtype: torch.dtype) -> None:
    """Bit for bit, of uniform and other tables, with NaN and Inf, and with the statistics rounded to 16 bits."""
    x = normal(2, 2, 40, 64, dtype=dtype, seed=bits)
    x[0, 0, 0, 0], x[0, 1, 1, 5], x[1, 0, 2] = float("nan"), float("inf"), 3.5
    for table in (uniform_table(bits, 2, 2), random_table(bits, 2, 2, bits)):
        for scale_dtype in (torch.float16, torch.bfloat16):
            scheme = Beyond(bits, scale_dtype=scale_dtype, trained=True)
            served = read_back_body(x, [table.levels[None, None]], [table.thresholds[None, None]], scheme.spec())
            found, _ = quantized(x, table, QuantizerConfig(bits, scale_dtype, 0.1))
            assert torch.equal(found.nan_to_num(7), served.nan_to_num(7)) and torch.equal(found.isnan(), served.isnan())


def test_uniform_tables_are_plain_asymmetric_quantization() -> None:
    from kvcompile.schemes.asymmetric import Axis, Kivi
    from kvcompile.types import Role, SlotSpec

    x, plain = normal(1, 2, 50, 64), Kivi(bits=4, axis=Axis.TOKEN)
    wanted = plain.decode(plain.encode(x), SlotSpec(2, 64, torch.float32, Role.VALUE))
    assert torch.equal(level_mapped(x, *(getattr(uniform_table(4, 2, 2), name) for name in ("levels", "thresholds")), RULE), wanted)


def test_gradient_passes_straight_through_to_tokens() -> None:
    out, (x, *_) = quantized(normal(1, 2, 9, 64), random_table(4, 2, 2, 0))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(grad)
    assert torch.equal(x.grad, grad)


def test_gradient_of_levels_is_that_of_autograd_with_bins_held() -> None:
    """Levels are the only smooth part: the codes do not depend on them."""
    x, table = normal(2, 2, 30, 64, seed=4), random_table(4, 2, 2, 2)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    out, leaves = quantized(x, table)
    (out * weight).sum().backward()
    levels = table.levels.clone().requires_grad_()
    (level_mapped(x, levels, table.thresholds, RULE) * weight).sum().backward()
    assert torch.allclose(leaves[1].grad, levels.grad, rtol=1e-4, atol=1e-3)


def crafted(places: list[float], grads: list[float], thresholds: list[float], levels: list[float], window: float) -> tuple[float, float]:
    """(G_L, G_R) of the second of three thresholds, of one group of 32 values at places in scales, scale 1 and zero point 0.

    The first two values are the ends of the group's range; a zero gradient keeps them, and the filling, out.
    """
    values = torch.tensor([0.0, 3.0, *places, *[0.0] * (30 - len(places))]).reshape(1, 1, 1, 32)
    grad = torch.tensor([0.0, 0.0, *grads, *[0.0] * (30 - len(grads))]).reshape(1, 1, 1, 32)
    table = Table(torch.tensor(levels).reshape(1, 1, 4), torch.tensor(thresholds).reshape(1, 1, 3))
    _, left, right = table_gradients(grad, values, table.levels, table.thresholds, QuantizerConfig(2, torch.float32, window))
    return float(left[0, 0, 1]), float(right[0, 0, 1])


@pytest.mark.parametrize(("places", "grads", "left", "right", "moves"), [
    # A value left of the threshold whose loss falls where it grows: the threshold moves left, to let it into the higher bin.
    ([1.45], [-2.0], 2.0, 0.0, "left"),
    # Its loss rises where it grows: nothing moves.
    ([1.45], [2.0], -2.0, 0.0, "stays"),
    # A value on the right whose loss falls where it shrinks: the threshold moves right.
    ([1.55], [2.0], 0.0, -2.0, "right"),
    ([1.55], [-2.0], 0.0, 2.0, "stays"),
    # The value on the threshold is on its right; one a window away is outside on the right, inside on the left.
    ([1.5], [2.0], 0.0, -2.0, "right"),
    ([1.75], [2.0], 0.0, 0.0, "stays"),
    ([1.25], [-2.0], 2.0, 0.0, "left"),
    # Both sides at once: candidates, whose sum is the step.
    ([1.45, 1.55], [-3.0, 2.0], 3.0, -2.0, "left"),
    ([1.45, 1.4, 1.55], [-3.0, 4.0, 2.0], -1.0, -2.0, "right"),
])
def test_signs_of_threshold_gradients_by_hand(places: list[float], grads: list[float], left: float, right: float, moves: str) -> None:
    """Levels 0 to 3 and scale 1: the jump is 1, so G is minus the sum of gradients in each window of 0.25."""
    found = crafted(places, grads, [0.5, 1.5, 2.5], [0.0, 1.0, 2.0, 3.0], 0.25)
    assert found == pytest.approx((left, right))
    gradient = float(rectified(*(torch.tensor(part) for part in found)))
    assert moves == ("left" if gradient > 0 else "right" if gradient < 0 else "stays")
    assert gradient == pytest.approx(max(left, 0.0) + min(right, 0.0))
    assert float(rectified(torch.tensor(left), torch.tensor(right), half_wave=False)) == pytest.approx(left + right)


def test_jump_between_levels_turns_the_sign() -> None:
    """A gradient moves a threshold the other way if the upper level is below the lower one."""
    rising, falling = (crafted([1.45], [-2.0], [0.5, 1.5, 2.5], levels, 0.25) for levels in ([0.0, 1.0, 4.0, 5.0], [0.0, 4.0, 1.0, 5.0]))
    assert rising[0] == pytest.approx(6.0) and falling[0] == pytest.approx(-6.0)


def test_window_sums_are_the_slope_of_smoothed_bins() -> None:
    """With each jump as a ramp over the two windows, G_L + G_R is 2 * window times the loss's central difference.

    The source's pseudo-gradient leaves the ramp's density, 1 / (2 * window), out; Adam does not see such a factor.
    """
    x, table, window = normal(2, 2, 400, 64, seed=8).double(), random_table(4, 2, 2, 6), 0.2
    # Wide enough apart that ramps do not meet.
    thresholds = torch.arange(15.0) + 0.5 + torch.rand(2, 2, 15, generator=torch.Generator().manual_seed(3)) * 0.4
    rule = QuantizerConfig(4, torch.float32, window)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    _, left, right = table_gradients(weight.float(), x.float(), table.levels, thresholds, rule)
    from kvcompile.extensions.beyond.learning.quantizer import _places

    place, scale, zero = (part.double() for part in _places(x.float(), 2, rule))

    def loss(moved: torch.Tensor) -> torch.Tensor:
        """The weighted sum by table, [K, G]."""
        ramps = ((place.unsqueeze(-1) - moved.double()[:, None, :, None] + window) / (2 * window)).clamp(0, 1)
        level = table.levels.double()[:, None, :, None, :1] + ramps * table.levels.double().diff(dim=-1)[:, None, :, None]
        value = (level.sum(-1) - table.levels.double()[:, None, :, None, 0] * (level.shape[-1] - 1)) * scale + zero
        return (value * weight.unflatten(-1, (2, 32))).sum((0, 2, 4))

    step = 1e-4
    for at in range(15):
        moved = torch.nn.functional.one_hot(torch.tensor(at), 15) * step
        slope = (loss(thresholds + moved) - loss(thresholds - moved)) / (2 * step)
        assert torch.allclose((left + right)[..., at].double(), 2 * window * slope, rtol=0.05, atol=0.05 * float(slope.abs().mean()) + 1e-3)


def test_pieces_add_up_to_the_batch() -> None:
    x, table = normal(4, 2, 20, 64, seed=9), random_table(4, 2, 2, 0)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    whole = table_gradients(grad, x, table.levels, table.thresholds, RULE)
    parts = [table_gradients(grad[at : at + 1], x[at : at + 1], table.levels, table.thresholds, RULE) for at in range(4)]
    for found, wanted in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.allclose(sum(found), wanted, rtol=1e-4, atol=1e-3)  # type: ignore[arg-type]
    # Rectified piece by piece they would not.
    apart = sum(rectified(part[1], part[2]) for part in parts)
    assert not torch.allclose(apart, rectified(whole[1], whole[2]), rtol=0.01)  # type: ignore[arg-type]


def test_levels_outside_of_the_range_decode_and_learn() -> None:
    table = Table(torch.tensor([-2.0, 1.0, 2.0, 7.0]).reshape(1, 1, 4), torch.tensor([0.5, 1.5, 2.5]).reshape(1, 1, 3))
    x = torch.linspace(0, 3, 32).reshape(1, 1, 1, 32)
    rule = QuantizerConfig(2, torch.float32, 0.1)
    out, leaves = quantized(x, table, rule)
    assert float(out.min()) == pytest.approx(-2.0, abs=1e-5) and float(out.max()) == pytest.approx(7.0, abs=1e-5)
    out.sum().backward()
    assert (leaves[1].grad > 0).all()


def test_the_operator_is_its_code_under_every_tracer() -> None:
    x, table = normal(1, 2, 9, 64), random_table(4, 2, 2, 0)
    nothing = torch.zeros_like(table.thresholds).requires_grad_()

    def run(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        return hard_quantize(x, levels, table.thresholds, nothing, nothing, 4, torch.float16, 0.1)

    levels = table.levels.clone().requires_grad_()
    plain = run(x.transpose(1, 2).contiguous().transpose(1, 2), levels)
    plain.square().sum().backward()
    wanted, levels.grad = levels.grad, None
    compiled = torch.compile(run, backend="aot_eager")(x, levels)
    compiled.square().sum().backward()
    assert torch.equal(compiled, plain) and torch.equal(levels.grad, wanted)


# --- projection ---------------------------------------------------------------------------------------


def pooled(y: list[float]) -> list[float]:
    """Pool adjacent violators, the textbook algorithm."""
    blocks: list[list[float]] = []
    for value in y:
        blocks.append([value])
        while len(blocks) > 1 and sum(blocks[-2]) / len(blocks[-2]) > sum(blocks[-1]) / len(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [sum(block) / len(block) for block in blocks for _ in block]


@pytest.mark.usefixtures("fresh_dynamo")
def test_batches_of_many_lengths_share_a_few_compilations() -> None:
    """As on CUDA, where the operators run compiled: more lengths than Dynamo would compile one by one."""
    table, code = random_table(2, 1, 2, 5), compiled(table_gradients)
    for number in range(10):
        x, grad = (normal(2, 1, 5 + 7 * number, 32, seed=number + side) for side in (0, 50))
        config = QuantizerConfig(2, torch.float16, 0.05)
        found, wanted = (run(grad, x, table.levels, table.thresholds, config) for run in (code, table_gradients))
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_isotonic_is_pool_adjacent_violators() -> None:
    y = torch.randn(200, 15, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(isotonic(y), torch.tensor([pooled(row.tolist()) for row in y]), atol=1e-5)


def test_projection_is_feasible_nearest_and_leaves_the_feasible_alone() -> None:
    y = torch.randn(300, 15, generator=torch.Generator().manual_seed(1)) * 3 + torch.arange(15.0)
    found = ordered(y, 15.0, 0.01)
    assert (found >= 0).all() and (found <= 15).all() and (found.diff(dim=-1) >= 0.01 - 1e-5).all()
    assert torch.equal(ordered(found.sort(-1).values, 15.0, 0.0), found.sort(-1).values)
    uniform = uniform_table(4, 2, 2).thresholds
    assert torch.equal(ordered(uniform, 15.0, 0.01), uniform)
    # No feasible point near the projection is nearer.
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        other = ordered(found + torch.randn(found.shape, generator=generator) * 0.05, 15.0, 0.01)
        assert ((found - y).square().sum(-1) <= (other - y).square().sum(-1) + 1e-4).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_operations_are_what_compiled_graphs_are_told(groups: int) -> None:
    """Results have the strides that the meta functions give, for tokens as a projection leaves them: training graphs rely on it."""
    x, grad = (torch.randn(2, 5, 3, 16).transpose(1, 2) for _ in range(2))
    table = random_table(2, 3, groups, 7)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kvcompile.level_mapped, (x, table.levels, table.thresholds, 2, torch.float16), test_utils=tests)
    torch.library.opcheck(
        torch.ops.kvcompile.table_gradients, (grad, x, table.levels, table.thresholds, 2, torch.float16, 0.05), test_utils=tests,
    )
