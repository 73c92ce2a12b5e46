"""Appends as a compiled graph on CUDA runs them, kernels and traced bodies alike, equal the eager bodies there, bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_triton_append import assert_same, one_nan
from test_triton_append_blocks import CASES as BLOCKS
from test_triton_append_blocks import calls, empty, new_tokens, origins
from test_triton_append_rows import BATCH, CASES, KV, PAGES, positions, stores, tokens
from test_triton_moves import CASES as MOVING
from test_triton_moves import compare as compare_moves
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile import schemes
from kvcompile.lowering.compile import compile_graph
from kvcompile.lowering.ops import operations as ops
from kvcompile.settings import Settings
from kvcompile.types import Role, SlotSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
MORE = (
    ("int8(scale_dtype=bfloat16)", 128, BF16), ("int4(scale_dtype=bfloat16)", 64, BF16), ("int4", 96, BF16),
    ("int8(granularity=tensor)", 64, BF16), ("int4(granularity=token)", 64, torch.float16),
)


def compiled(run, arguments: list[torch.Tensor]):
    """As the backend compiles it."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in arguments]
    with mode:
        module = make_fx(run)(*fakes)
    with torch.no_grad():
        return compile_graph(module, fakes, mode, Settings())


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (2, 77)])
@pytest.mark.parametrize(("text", "dim", "dtype"), [*CASES, *MORE])
def test_tokens_without_a_window(text: str, dim: int, dtype: torch.dtype, batch: int, count: int) -> None:
    new = [tokens(seed, dim, dtype).cuda()[:, :, -count:] for seed in range(2)]
    pos = positions(batch).cuda()[:, -count:]
    pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
    wanted, found = stores(text, dim, dtype, "cuda"), stores(text, dim, dtype, "cuda")
    spelled = schemes.parse(text).spec()

    def run(k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        for x, half in zip((k, v), (planes[:2], planes[2:]), strict=True):
            ops.append(x, list(half), pos, spelled)
        return []

    arguments = [*new, pos, *found[0], *found[1]]
    compiled(run, arguments)(*arguments)
    for x, planes in zip(new, wanted, strict=True):
        ops.append_body(x, planes, pos, spelled)
    for mine, body in zip(found, wanted, strict=True):
        assert_same(one_nan(mine, text), one_nan(body, text), (text, dim, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("text", "dim"), [("int4(group=16)", 80), ("int8", 80), ("int4", 128)])
def test_tokens_that_the_graph_makes(text: str, dim: int, dtype: torch.dtype) -> None:
    """Keys of a projection, turned to heads first and attended to as well: Inductor settles the strides that the append reads."""
    rows, count = BATCH, 37
    h, w = torch.randn(rows, count, 256, device="cuda", dtype=dtype), torch.randn(256, KV * dim, device="cuda", dtype=dtype)
    # Products with powers of two are exact in either dtype.
    scale = torch.exp2(torch.randint(-2, 3, (count, dim), device="cuda")).to(dtype)
    wanted, found = (stores(text, dim, dtype, "cuda")[0] for _ in range(2))
    spelled = schemes.parse(text).spec()

    def run(h: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, pos: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        k = (h @ w).view(rows, count, KV, dim).transpose(1, 2) * scale
        ops.append(k, list(planes), pos, spelled)
        return [torch.nn.functional.scaled_dot_product_attention(k, k, k)]

    arguments = [h, w, scale, torch.arange(count, device="cuda")[None], *found]
    compiled(run, arguments)(*arguments)
    ops.append_body((h @ w).view(rows, count, KV, dim).transpose(1, 2) * scale, wanted, arguments[3], spelled)
    assert_same(found, wanted, (text, dim, dtype))


def taken(rest: tuple[torch.Tensor, ...], planes: list[list[torch.Tensor]]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The planes of keys, those of values, and what is behind them; a slot may have more of them than the other."""
    keys, both = len(planes[0]), len(planes[0]) + len(planes[1])
    return rest[:keys], rest[keys:both], rest[both:]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("text", "dim"), [
    ("kivi", 128), ("kivi(bits=3)", 128), ("kivi(bits=4,group=16,scale_dtype=float32)", 64), ("kivi(window=64)", 64), ("kivi", 96),
    ("kivi(scale_dtype=bfloat16)", 128), ("squat(lam=0.0)", 256), ("int4(window=32)", 128),
    ("int8(window=16)", 128), ("fp8(window=32)", 64), ("int4(window=32,scale_dtype=bfloat16)", 128), ("nf4(window=32)", 64),
])
def test_one_token_into_a_window(text: str, dim: int, padded: bool) -> None:
    halves = [schemes.parse(text).for_role(role) for role in Role]
    rows, before = 2 if padded else 1, halves[0].window + halves[0].group - 2
    origin = torch.tensor([0, 3], device="cuda") if padded else None
    x = (torch.randn(2, KV, before + 4, dim, generator=torch.Generator().manual_seed(dim)) * 3 + torch.arange(dim)).cuda().to(BF16)
    x[1, 1, -1, 5], x[0, 1, -1, 6] = float("nan"), float("inf")
    wanted: list[list[torch.Tensor]] = []
    for scheme, role in zip(halves, Role, strict=True):
        layout = scheme.layout(SlotSpec(KV, dim, BF16, role))
        planes = [torch.zeros(plane.shape(3, 2, KV), dtype=plane.dtype, device="cuda") for plane in layout.planes]
        ops.append_window_body(x[:, :, :before], planes, torch.arange(before, device="cuda").expand(rows, -1), origin, scheme.spec())
        wanted.append(planes)
    found = [[plane.clone() for plane in planes] for planes in wanted]

    def run(k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        keys, values, given = taken(rest, wanted)
        results = []
        for x, half, scheme in zip((k, v), (keys, values), halves, strict=True):
            results += ops.append_window(x, list(half), pos, given[0] if given else None, scheme.spec())
        return results

    step = None
    # The last one is out of order.
    for at in (*range(before, before + 4), before + 9):
        pos, new = torch.full((rows, 1), at, device="cuda"), x[:, :, min(at, before + 3)].unsqueeze(2)
        arguments = [new, new, pos, *found[0], *found[1], *([] if origin is None else [origin])]
        step = step or compiled(run, arguments)
        results = step(*arguments)
        expected: list[torch.Tensor] = []
        for planes, scheme in zip(wanted, halves, strict=True):
            expected += ops.append_window_body(new, planes, pos, origin, scheme.spec())
        mine, body = ((*one_nan(keys, text), *one_nan(values, text)) for keys, values in (found, wanted))
        assert_same((*mine, *results), (*body, *expected), (text, dim, at))


MORE_BLOCKS = (("kivi(scale_dtype=bfloat16)", 128, BF16, 3), ("kivi(bits=3,window=128)", 128, BF16, 2), ("squat(lam=0.0)", 256, BF16, 3))


@pytest.mark.parametrize("padding", range(4))
@pytest.mark.parametrize("pieces", [(7, 32, 75), (114,)])
@pytest.mark.parametrize(("text", "dim", "dtype", "pages"), [*BLOCKS, *MORE_BLOCKS])
def test_blocks_into_a_window(
    text: str, dim: int, dtype: torch.dtype, pages: int, pieces: tuple[int, ...], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one compiled graph a size, by the kernels: their launches are counted where they are traced."""
    from kvcompile.lowering.append import appends

    traced: list[int] = []
    real = appends._window_kernels
    monkeypatch.setattr(appends, "_window_kernels", lambda slots: traced.append(len(slots)) or real(slots))
    given, rows = origins()[padding]
    origin = None if given is None else given.cuda()
    halves = [schemes.parse(text).for_role(role).spec() for role in Role]
    count = sum(pieces)
    new = [new_tokens(seed, count, dim, dtype).cuda() for seed in range(2)]
    wanted, found = (empty(text, dim, dtype, pages, "cuda") for _ in range(2))

    def run(k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        keys, values, one = taken(rest, found)
        results = []
        for x, half, scheme in zip((k, v), (keys, values), halves, strict=True):
            results += ops.append_window(x, list(half), pos, one[0] if one else None, scheme)
        return results

    steps = {}
    for index, (which, positions_BS) in enumerate(calls(count, pieces, rows)):
        pos = positions_BS.contiguous().cuda()
        arguments = [*(x[:, :, which] for x in new), pos, *found[0], *found[1], *([] if origin is None else [origin])]
        size = pos.shape[1]
        steps[size] = steps.get(size) or compiled(run, arguments)
        results = steps[size](*arguments)
        expected: list[torch.Tensor] = []
        for x, planes, scheme in zip(new, wanted, halves, strict=True):
            expected += ops.append_window_body(x[:, :, which], planes, pos, origin, scheme)
        mine, body = ((*one_nan(keys, text), *one_nan(values, text)) for keys, values in (found, wanted))
        assert_same((*mine, *results), (*body, *expected), (text, dim, dtype, rows, index))
    assert len(traced) >= len(steps)
    assert set(traced) == {2}


@pytest.mark.parametrize(("text", "dtype"), [*MOVING, ("squat", BF16)])
def test_errors_move_channels(text: str, dtype: torch.dtype) -> None:
    """By the kernels for many tokens and for one."""
    compare_moves(text, dtype, "cuda")
