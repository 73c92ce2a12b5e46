"""What stands at both ends of certified attention's kernels: bounds of heads, draws, telemetry; and that nothing stands between them.

As in ``test_certified_kernels``, what needs Triton's interpreter runs in a process of its own (``interpreted``); on CUDA it runs compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mpmath
import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from interpreted import interpreted  # noqa: E402

from benchmarks.extensions.certified.certified_soundness import Cache, Draw, Shape, Step, gaussian, padded  # noqa: E402
from kvcompile.extensions.certified.device_step import certified_by_kernels  # noqa: E402
from kvcompile.extensions.certified.kernels import bounds as triton_bounds  # noqa: E402
from kvcompile.extensions.certified.kernels.finish import as_dtype  # noqa: E402
from kvcompile.extensions.certified.kernels.finish import up32 as rounded_up32  # noqa: E402
from kvcompile.extensions.certified.kernels.select_blocks import draw, drawn_before  # noqa: E402
from kvcompile.extensions.certified.promotion import chance  # noqa: E402
from kvcompile.extensions.certified.scheme import Certified  # noqa: E402
from kvcompile.lowering.certificate.bound_printer import FUNCTION, slack, triton_source, up32  # noqa: E402
from kvcompile.lowering.certificate.telemetry import accumulate  # noqa: E402
from kvcompile.lowering.decode.offline import load_module  # noqa: E402
from kvcompile.lowering.host.launches import KernelLaunch, OnlyRoom, Recorder  # noqa: E402
from kvcompile.lowering.ops.operands import AttendOperands  # noqa: E402
from kvcompile.schemes.certificate import bounds  # noqa: E402
from kvcompile.schemes.certificate.bounds import Bound  # noqa: E402
from kvcompile.schemes.certificate.policy import Cause, Certify, Count, Fallback, Figure, Rung, Select  # noqa: E402
from kvcompile.schemes.certificate.telemetry import COLUMNS, KINDS, TELEMETRY, JoinRule  # noqa: E402

F64 = torch.float64
HEADS = (bounds.KEY, bounds.CENTER_NORM, bounds.ACCUMULATION, bounds.OUTPUT_ROUNDING, bounds.VALUE)
EVALUATE = '''
import triton
import triton.language as tl
from kvcompile.extensions.certified.kernels.bounds import tanh

{function}

@triton.jit
def evaluate(IN, OUT, count, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, {name}({arguments}))
'''


@triton.jit
def functions(IN, RISE, TANH, UP, ROUNDED, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(IN + i)
    tl.store(RISE + i, triton_bounds.rise(x))
    tl.store(TANH + i, triton_bounds.tanh(x))
    tl.store(UP + i, rounded_up32(x))
    tl.store(ROUNDED + i, as_dtype(x.to(tl.float32), ROUNDED.dtype.element_ty))


@triton.jit
def draws(CLOCK, OUT, K: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, N2: tl.constexpr):
    r = tl.program_id(0)
    n = tl.arange(0, N2)
    before = drawn_before(tl.load(CLOCK), r // (Q * K), r // Q % K, r % Q)
    tl.store(OUT + r * N + n, draw(before, n), mask=n < N)


@functools.cache
def function_of(bound: Bound) -> Callable[..., mpmath.mpf]:
    """The bound as it is written, as a function of its arguments in order."""
    return sympy.lambdify(sorted(bound.expression.free_symbols, key=lambda symbol: symbol.name), bound.expression, "mpmath")


def exact(bound: Bound, arguments: list[float]) -> mpmath.mpf:
    """Evaluate the bound at its arguments in order, in 60 digits."""
    with mpmath.workdps(60):
        return mpmath.mpf(function_of(bound)(*map(mpmath.mpf, arguments)))


def printed_functions(device: str) -> None:
    """What Triton lacks is within the units that the printer allows it; roundings are torch's."""
    spread = torch.cat([torch.logspace(-300, 3, 700, dtype=F64), torch.rand(300, dtype=F64), torch.tensor([0.0, 0.25, 0.5, 2.0**-1074])])
    x = torch.nn.functional.pad(spread, (0, 1024 - len(spread))).to(device)
    rise, tanh, above = torch.empty_like(x), torch.empty_like(x), torch.empty(len(x), device=device)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.empty(len(x), dtype=dtype, device=device)
        functions[(1,)](x, rise, tanh, above, rounded, N=1024)
        assert torch.equal(rounded, x.to(torch.float32).to(dtype))
    assert torch.equal(above, up32(x))
    for function, found in ((lambda v: -mpmath.expm1(-v), rise), (mpmath.tanh, tanh)):
        with mpmath.workdps(60):
            true = [function(mpmath.mpf(v)) for v in x.tolist()]
            assert all(abs(mine - wanted) <= FUNCTION * 2.0**-53 * wanted + mpmath.mpf(2) ** -1074
                       for mine, wanted in zip(found.tolist(), true, strict=True))
    odd = torch.tensor([float("inf"), float("nan")], dtype=F64, device=device).repeat(512)
    functions[(1,)](odd, rise, tanh, above, rounded, N=1024)
    assert (tanh[0::2] == 1).all() and torch.isnan(tanh[1::2]).all() and torch.isnan(above[1::2]).all()


def printed_bounds(device: str) -> None:
    """Bounds of heads are rounded outwards in Triton as in ATen, and NaN stays NaN."""
    source = torch.Generator().manual_seed(1)
    for bound in HEADS:
        count = len(bound.arguments)
        given = (10 ** (8 * torch.rand(count, 128, dtype=F64, generator=source) - 5)).to(device)
        arguments = ", ".join(f"tl.load(IN + {place} * N + i)" for place in range(count))
        module = load_module(EVALUATE.format(function=triton_source(bound), name=bound.name, arguments=arguments), "judged")
        found = torch.empty(128, dtype=F64, device=device)
        module.evaluate[(1,)](given, found, count, N=128)
        for place in range(128):
            true = exact(bound, given[:, place].tolist())
            assert true <= found[place].item() <= true * (1 + 2 * slack(bound)), (bound.name, place)
        for broken in range(count):
            odd = given.clone()
            odd[broken] = float("nan")
            module.evaluate[(1,)](odd, found, count, N=128)
            assert torch.isnan(found).all(), (bound.name, bound.arguments[broken])


def drawn(device: str) -> None:
    """The draws of ``choose`` are the definition's, bit for bit, at any step."""
    B, K, Q, N = 2, 3, 5, 70
    found = torch.empty(B, K, Q, N, dtype=torch.int64, device=device)
    for number in (0, 7, 2**33 + 12345, 2**52 + 1):
        for dtype in (torch.int64, F64):
            clock = torch.tensor([number], dtype=dtype, device=device)
            draws[(B * K * Q,)](clock, found, K=K, Q=Q, N=N, N2=128)
            assert torch.equal(found.to(F64), chance(clock.to(torch.int64), found) * 2.0**32)
    assert found.unique().numel() == found.numel()


def counted(step: Step, steps: int = 2) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Telemetry of some steps by kernels against ``accumulate`` of what they returned; it, by column, and the counters of the last step."""
    cache = step.cache
    B, K = step.q.shape[0], cache.keys[0].shape[2]
    # The plane of a cache that has room for more rows.
    mine = torch.zeros(1, B + 1, K, 1, TELEMETRY, dtype=F64, device=step.q.device)[:, 1:]
    wanted = torch.zeros_like(mine)
    for _ in range(steps):
        common = (step.policy, Certified(), step.operands(), cache.originals)
        output, figures, counts = certified_by_kernels(*common, mine, splits=2, telemetry=mine)
        accumulate(wanted, figures, counts)
    # Without telemetry and with the clock apart: the same step.
    again = certified_by_kernels(*common, torch.tensor([steps - 1], device=step.q.device), splits=2)
    assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip((output, figures, counts), again, strict=True))
    sums = torch.tensor([name.startswith("sum_") for name in COLUMNS] + [False] * (TELEMETRY - len(COLUMNS)), device=step.q.device)
    assert torch.equal(mine[..., ~sums], wanted[..., ~sums])
    assert torch.allclose(mine[..., sums], wanted[..., sums], rtol=1e-14, atol=0, equal_nan=False)
    return dict(zip(COLUMNS, mine[0, :, :, 0].flatten(0, 1).cpu().unbind(-1), strict=False)), counts


def telemetry(device: str) -> None:
    """Of plain, explored, fallen and broken rows; with sinks of another dtype and stride, and of heads that are no power of two."""
    small = Shape(B=2, H=6, K=3, S=1, D=32, T=100)
    made = padded(Draw(4, device), small)
    step, _, _ = made.step(Certify(explore=0.3, tau_cov=0.5, k_min=0, k_max=1, key_budget=0.01), torch.bfloat16)
    step.sinks = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)[::2]
    columns, _ = counted(step)
    assert (columns["steps"] == 2).all() and (columns["head_steps"] == 4).all() and columns["explored"].sum() > 0
    assert 0 < columns["rung_head"].sum() < 24 and KINDS.count(JoinRule.MOST) == len(Figure)

    step, _, _ = gaussian(Draw(2, device), Shape(B=1, H=2, K=1, S=1, D=32, T=60)).step(Certify(fallback=Fallback.REPORT), torch.float32)
    columns, counts = counted(step, 1)
    assert (counts[..., Count.RUNG] < Rung.HEAD).all() and (columns["steps"] == 1).all()

    planes = list(step.cache.values)
    planes[3] = torch.full_like(planes[3], float("nan"))
    broken = Cache(step.cache.keys, planes, step.cache.originals, step.cache.exact_newest, step.cache.base, step.cache.length)
    step = Step(step.q, broken, step.scale, Certify(rank=0))
    columns, counts = counted(step, 1)
    assert (counts[..., Count.CAUSES] & int(Cause.NOT_FINITE) != 0).all() and torch.isinf(columns["most_candidate_key"]).all()
    assert torch.isfinite(columns["most_arithmetic"]).all(), "what is returned is from the originals"


def everything(device: str) -> None:
    """All of this."""
    printed_functions(device)
    printed_bounds(device)
    drawn(device)
    telemetry(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_both_ends_of_the_kernels_on_a_device() -> None:
    everything("cuda")


@pytest.mark.timeout(600)
def test_both_ends_of_the_kernels_in_the_interpreter() -> None:
    interpreted(everything, "cpu")


@pytest.mark.parametrize(("policy", "kernels"), [
    (Certify(), 11), (Certify(explore=0.1, value_budget=0.1, key_budget=1.0), 12), (Certify(select=Select.GROUP), 12),
    (Certify(fallback=Fallback.REPORT), 8),
], ids=str)
def test_nothing_but_kernels_stands_in_a_graph(policy: Certify, kernels: int) -> None:
    """Beside them only buffers are made and looked at."""
    step, _, _ = gaussian(Draw(1), Shape(B=2, H=8, K=2, S=1, D=64, T=333)).step(policy, torch.bfloat16)
    cache, mode, recorder = step.cache, FakeTensorMode(), Recorder()
    held = torch.zeros(1, 2, 2, 1, TELEMETRY, dtype=F64)
    given = (step.q, cache.keys, cache.values, cache.originals, step.hi, cache.exact_newest, cache.base, held)
    q, keys, values, originals, hi, exact_newest, base, held = (
        [mode.from_tensor(x) for x in side] if isinstance(side, list) else mode.from_tensor(side) for side in given
    )
    with mode, OnlyRoom():
        attended = AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.1, 0.0, 64, exact_newest, base)
        certified_by_kernels(policy, Certified(), attended, originals, held, telemetry=held, launcher=recorder)
    assert [type(step) for step in recorder.steps] == [KernelLaunch] * kernels
