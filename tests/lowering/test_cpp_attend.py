"""The CPU kernel of ``kvcompile::attend`` against its eager body in float64.

Every case is compiled with Inductor; g++ takes seconds a kernel, so one kernel with symbolic batch,
queries and pages serves many shapes. Planes have poisoned rows and pages beyond the tokens in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from registry import PLAIN
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

from kvcompile import schemes
from kvcompile.lowering import inductor
from kvcompile.lowering.attend_kernels import CPP, AttendFacts
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.testing.samples import holds
from kvcompile.types import PAGE, Role, SlotSpec

pytestmark = pytest.mark.compile

TOKENS = (1, 63, 64, 65, 1000)
SPARE_PAGES = 2


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Our lowering, two threads (so that tokens are split), and no cache that would serve an older kernel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    inductor.install()
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """One kernel: schemes, heads, widths, masks; ``shapes`` are (B, S) to run it with."""

    keys: str
    values: str
    dtype: torch.dtype
    kv_heads: int
    group: int
    width: int
    width_v: int
    masks: str = ""
    softcap: float = 0.0
    shapes: tuple[tuple[int, int], ...] = ((3, 5),)


CASES = {
    "int8_g4_d128": Case("int8", "int8", torch.bfloat16, 2, 4, 128, 128, shapes=((1, 1), (3, 5))),
    "int8_fp8_matrix": Case("int8", "fp8", torch.bfloat16, 2, 4, 64, 96, "keep lo", shapes=((2, 70),)),
    "int4_g1_d64_keep": Case("int4", "int4(scale_dtype=float32)", torch.float16, 3, 1, 64, 64, "keep"),
    "fp8_int8_g7_d96_bool": Case("fp8", "int8(granularity=group)", torch.bfloat16, 1, 7, 96, 64, "bool"),
    "dense_g8_d80_window_sinks": Case("dense", "dense", torch.bfloat16, 1, 8, 80, 80, "lo sinks"),
    "int4_g4_d80_softcap": Case("int4(group=8)", "int4(group=16)", torch.float32, 1, 4, 80, 80, "lo", 5.0, ((3, 1),)),
    "int8_dense_d256_bias": Case("int8(scale_dtype=bfloat16)", "dense", torch.float32, 2, 2, 256, 128, "bias keep sinks"),
    # Tables and zero points: 4 and 16 levels; groups of 32, of a whole head, and of 16 that do not lie within one part of a word.
    "tables_g4_d128": Case("beyond", "beyond(bits=2)", torch.bfloat16, 2, 4, 128, 64, shapes=((1, 1), (3, 5))),
    "tables_beside_int8": Case("nf4", "int8", torch.float32, 2, 2, 64, 96, "keep lo", shapes=((2, 1), (2, 70))),
    "gauss_beside_two_bits": Case("gauss", "gauss(bits=2)", torch.bfloat16, 2, 4, 128, 64, "keep", shapes=((2, 1), (2, 70))),
    "tables_odd_groups": Case(
        "beyond", "beyond(group=64,scale_dtype=float32)", torch.float32, 1, 3, 80, 64, "bias", shapes=((2, 1), (1, 9)),
    ),
    # One scale a kv head, codes that hold NaN: by rows of vectors and, with many bfloat16 rows, by matrices.
    "static_g4_d128": Case("int8-static", "fp8-static", torch.bfloat16, 3, 4, 128, 80, "keep", shapes=((1, 1), (2, 70))),
    "static_softcap": Case("fp8-static", "int8-static", torch.float32, 2, 3, 80, 64, "lo bias", 5.0, ((2, 1), (1, 9))),
    "int8_int4_filled": Case("int8", "int4", torch.float32, 1, 4, 64, 64, "bool fill sinks", shapes=((2, 1), (1, 5))),
    "int8_int4_filled_bias": Case("int8", "int4", torch.bfloat16, 1, 4, 64, 64, "bias fill lo", shapes=((2, 1), (1, 5))),
    "dense_fp8_half": Case("dense", "fp8(granularity=group)", torch.float16, 1, 4, 64, 96, "lo keep bool headbias", 0.0, ((1, 5),)),
}


def any_case(scheme: schemes.Scheme) -> Case | None:
    """A case of a scheme that has none here, where the template knows it: one query and several, under a mask."""
    halves = [(scheme.for_role(role), role) for role in Role]
    width = next(dim for dim in (64, 80, 128, 256) if all(holds(half, SlotSpec(2, dim, torch.float32, role)) for half, role in halves))
    slots = tuple((half.spec(), SlotSpec(2, width, torch.float32, role)) for half, role in halves)
    if CPP.gap(AttendFacts("cpu", slots, exact_newest=scheme.window > 0)) is not None:
        return None
    return Case(slots[0][0], slots[1][0], torch.float32, 2, 3, width, width, "keep lo", shapes=((2, 1), (1, 5)))


NAMED = {text.partition("(")[0] for case in CASES.values() for text in (case.keys, case.values)}
CASES |= {kind.name: case for kind in PLAIN if kind.name not in NAMED and (case := any_case(kind())) is not None}


def store(x_BKTD: torch.Tensor, spelled: str) -> list[torch.Tensor]:
    """Planes of a store that holds x, everything unwritten poisoned."""
    batch, heads, tokens, _ = x_BKTD.shape
    planes = []
    for rows in schemes.parse(spelled).encode(x_BKTD):
        plane = rows.new_empty(tokens // PAGE + SPARE_PAGES, batch, heads, PAGE, rows.shape[-1])
        plane.fill_(float("nan") if rows.dtype.is_floating_point else -128 if rows.dtype == torch.int8 else 0x7F)
        ops.write_rows(plane, rows, torch.arange(tokens)[None])
        planes.append(plane)
    heads, made = x_BKTD.shape[1], schemes.parse(spelled)
    slot = SlotSpec(heads, x_BKTD.shape[3], x_BKTD.dtype, Role.KEY)
    read = [plane for plane in made.layout(slot).planes[: made.planes_read(slot)] if plane.constant]
    return [*planes, *(torch.rand(plane.shape(1, 1, heads)) * plane.width for plane in read)]


def masks(case: Case, batch: int, queries: int, tokens: int) -> dict[str, torch.Tensor | None]:
    """Operands hi .. sinks: causal by hi with one query that sees nothing, others as the case names them."""
    hi = torch.arange(tokens - queries, tokens).expand(batch, -1).clamp(min=-1).clone()
    if queries > 1:
        hi[0, 0] = -1
    heads = case.kv_heads * case.group
    keep = torch.rand(batch, tokens) > 0.3
    bias = None
    if "bool" in case.masks:
        bias = torch.rand(batch, 1, queries, tokens) > 0.4
    elif "bias" in case.masks:
        bias = torch.randn(1, heads, queries, tokens, dtype=case.dtype).masked_fill(torch.rand(tokens) > 0.8, float("-inf"))
    return {
        "hi": hi,
        "lo": (hi - 100).clamp(min=-5) if "lo" in case.masks else None,
        "keep": keep if "keep" in case.masks else None,
        "bias": bias,
        "sinks": torch.randn(heads, dtype=case.dtype) if "sinks" in case.masks else None,
    }


def check(got: torch.Tensor, operands: tuple[object, ...], fill: float | None = None) -> None:
    """Error at most twice that of the eager float32 body plus one rounding of the result's dtype."""
    wide = (operands[0].double(), *operands[1:])  # type: ignore[attr-defined]
    exact = ops.attend_body(AttendOperands(*wide, fill=fill), compute=torch.float64)  # type: ignore[arg-type]
    eager = ops.attend_body(AttendOperands(*operands, fill=fill))  # type: ignore[arg-type]
    assert got.dtype == eager.dtype and got.shape == eager.shape and got.is_contiguous()
    assert torch.isfinite(got).all()
    allowed = (eager.double() - exact).abs().max() + torch.finfo(got.dtype).eps * exact.abs().max()
    worst = (got.double() - exact).abs().max()
    assert worst <= 2 * allowed, f"error {worst:.3g}, allowed {2 * allowed:.3g}"


def fill_of(case: Case) -> float | None:
    """A score among those of visible tokens, where the mask replaces scores."""
    return -1.5 if "fill" in case.masks else None


def compiled(case: Case) -> Callable[..., torch.Tensor]:
    scale = case.width**-0.5

    def run(
        q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None,
        keep: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        named = case.keys, case.values, scale, case.softcap, case.width_v
        return ops.attend(q, keys, values, hi, lo, keep, bias, sinks, *named, fill=fill_of(case))

    return torch.compile(run, dynamic=True, fullgraph=True)


@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str) -> None:
    case = CASES[name]
    run = compiled(case)
    for batch, queries in case.shapes:
        # One token is a graph and a kernel of its own: these cases together have every kind of mask.
        for tokens in TOKENS if batch == 1 or "keep" in case.masks else TOKENS[1:]:
            q = torch.randn(batch, queries, case.kv_heads * case.group, case.width, dtype=case.dtype).transpose(1, 2)
            k = torch.randn(batch, case.kv_heads, tokens, case.width, dtype=case.dtype)
            v = torch.randn(batch, case.kv_heads, tokens, case.width_v, dtype=case.dtype)
            keys, values = store(k, case.keys), store(v, case.values)
            operands = (q, keys, values, *masks(case, batch, queries, tokens).values())
            got = run(*operands)
            check(got, (*operands, case.keys, case.values, case.width**-0.5, case.softcap, case.width_v), fill_of(case))


@pytest.mark.parametrize("name", ["int8_fp8_matrix", "dense_g8_d80_window_sinks", "static_softcap", "tables_beside_int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_log_sums_stand_behind_the_result(name: str, threads: int) -> None:
    """As the definition gives them in float64, -inf where a query sees nothing; with more threads the tokens are split and merged."""
    case = CASES[name]

    def run(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], *masked: torch.Tensor | None) -> torch.Tensor:
        named = case.keys, case.values, case.width**-0.5, case.softcap, case.width_v
        return ops.attend(q, keys, values, *masked, *named, log_sums=True)

    step, before = torch.compile(run, dynamic=True, fullgraph=True), torch.get_num_threads()
    for batch, queries in case.shapes:
        q = torch.randn(batch, queries, case.kv_heads * case.group, case.width, dtype=case.dtype).transpose(1, 2)
        k = torch.randn(batch, case.kv_heads, 700, case.width, dtype=case.dtype)
        v = torch.randn(batch, case.kv_heads, 700, case.width_v, dtype=case.dtype)
        operands = store(k, case.keys), store(v, case.values), *masks(case, batch, queries, 700).values()
        scales = case.keys, case.values, case.width**-0.5, case.softcap, case.width_v
        exact = ops.attend_body(AttendOperands(q.double(), *operands, *scales, log_sums=True), compute=torch.float64)
        try:
            torch.set_num_threads(threads)
            got = step(q, *operands)
        finally:
            torch.set_num_threads(before)
        assert got.dtype == torch.float32 and exact.isneginf()[..., :-1].sum() == 0 and got.shape[-1] == case.width_v + 1
        # Products of many bfloat16 rows are rounded to it.
        torch.testing.assert_close(got.double(), exact, atol=0.03 if case.dtype == torch.bfloat16 and queries > 1 else 2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_tensors_as_one_page(dtype: torch.dtype) -> None:
    """Halves of a combined (B, T, 2, K, D) buffer as keys and values, 200 queries, causal; one pointer argument."""
    T, S, H, K, D = 300, 200, 4, 2, 64

    def run(q: torch.Tensor, both: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        k, v = both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)
        return ops.attend(q, [k[None]], [v[None]], hi, None, None, None, None, "dense", "dense", 0.125, 0.0, D)

    q, both = torch.randn(2, H, S, D, dtype=dtype), torch.randn(2, T, 2, K, D, dtype=dtype)
    both[:, T - 1] = float("nan")
    hi = torch.arange(T - S - 1, T - 1)[None]
    got, (code,) = run_and_get_code(torch.compile(run, dynamic=True), q, both, hi)
    k, v = both.unbind(2)
    check(got, (q, [k.transpose(1, 2)[None]], [v.transpose(1, 2)[None]], hi, None, None, None, None, "dense", "dense", 0.125, 0.0, D))
    FileCheck().check("_attend::run(p)").check_count("empty_strided_cpu(", 1, exactly=True).run(_allocations(code))


def test_channels_that_are_not_adjacent() -> None:
    """Keys kept as [B, K, D, T], half precision: read in place, by strides."""
    T, H, K, D = 130, 4, 2, 72

    def run(q: torch.Tensor, kt: torch.Tensor, v: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        k = kt.transpose(2, 3)
        return ops.attend(q, [k[None]], [v[None]], hi, None, None, None, None, "dense", "dense", 0.125, 0.0, 40)

    q, kt, v = torch.randn(1, H, 1, D).half(), torch.randn(1, K, D, T).half(), torch.randn(1, K, T, 40).half()
    hi = torch.tensor([[T - 1]])
    got = torch.compile(run)(q, kt, v, hi)
    check(got, (q, [kt.transpose(2, 3)[None]], [v[None]], hi, None, None, None, None, "dense", "dense", 0.125, 0.0, 40))


def test_reads_what_the_same_graph_wrote_and_feeds_its_users() -> None:
    """A cache write before attention and pointwise users after it, in one graph."""
    C, H, K, D = 128, 4, 2, 64

    def run(
        q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor
    ) -> torch.Tensor:
        cache_k.index_copy_(2, pos, k * 2)
        cache_v.index_copy_(2, pos, v + 1)
        hi = pos[None]
        out = ops.attend(q * 3, [cache_k[None]], [cache_v[None]], hi, None, None, None, None, "dense", "dense", 0.125, 0.0, D)
        return torch.sigmoid(out) * out + 1

    def operands() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        caches = torch.full((2, 1, K, C, D), float("nan"))
        caches[:, :, :, :70] = torch.randn(2, 1, K, 70, D)
        return torch.randn(1, H, 1, D), *caches.unbind(), *torch.randn(2, 1, K, 1, D).unbind(), torch.tensor([70])

    eager, ours = operands(), operands()
    expected = run(*eager)
    got = torch.compile(run, fullgraph=True)(*ours)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours[1:3], eager[1:3], equal_nan=True)


def test_output_code_and_nan() -> None:
    """The kernel stands in Inductor's module, allocates the result only, and a NaN that is attended to shows."""
    case = CASES["int8_g4_d128"]
    q = torch.randn(1, 8, 1, 128, dtype=case.dtype)
    x = torch.randn(1, 2, 700, 128, dtype=case.dtype)
    keys, values = store(x, "int8"), store(x, "int8")
    hi = torch.tensor([[699]])

    def run(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], hi: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, keys, values, hi, None, None, None, None, "int8", "int8", case.width**-0.5, 0.0, 128)

    step = torch.compile(run)
    _, (code,) = run_and_get_code(step, q, keys, values, hi)
    FileCheck().check("struct Key").check("_attend::run(p)").check_not("kvcompile.attend").run(code)
    FileCheck().check_count("empty_strided_cpu(", 1, exactly=True).check_count("bfloat16)", 1).run(_allocations(code))
    for planes in (keys, values):
        kept = planes[1].clone()
        planes[1][3, 0, 1, 7] = float("nan")
        got = step(q, keys, values, hi)
        assert torch.isfinite(got[:, :4]).all() and torch.isnan(got[:, 4:]).all()
        planes[1].copy_(kept)


def _allocations(code: str) -> str:
    """The kernels' source and the buffers that the wrapper allocates, without imports and self-benchmarks."""
    lines = code.partition("def get_args")[0].splitlines()
    return "\n".join(line for line in lines if "empty_strided_cpu =" not in line)
