"""Paged operations against ``encode`` and ``decode`` by hand, one row, head and query at a time."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import kvcompile
from kvcompile.errors import BadBlock, KvcompileError, NotPaged
from kvcompile.extensions.static_scales.scales import Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import StaticInt8
from kvcompile.schemes import Scheme, parse, registered
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.serving import operations
from kvcompile.serving.block_layout import BlockLayout, layout_of
from kvcompile.serving.pools import Pool
from kvcompile.types import Granularity, Role, SlotSpec

TEXTS = (
    "dense", "int8", "fp8", "int4", "nf4", "gauss", "beyond", "int8-static", "fp8-static", "int4(rotate=k)", "int8(rotate=kv)",
    "gauss(bits=3)", "beyond(bits=5)", "fp8(granularity=group)", "int4(scale_dtype=float32)",
)

KEY_DIM = 64
"""Channels of a key. The Hadamard matrix of 64 channels, as that of 16, is divided by a power of two, so a rotation is exact too."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call has: schemes, sizes, tokens and queries of each row, masks."""

    keys: str
    values: str
    page: int
    heads: int
    group: int
    value_dim: int
    rows: tuple[tuple[int, int], ...]
    window: int
    sinks: bool
    softcap: float
    table: torch.dtype
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 70))
        rows.append((tokens, draw(st.integers(0, min(tokens, 5)))))
    return Case(
        draw(st.sampled_from(TEXTS)), draw(st.sampled_from(TEXTS)), draw(st.sampled_from((16, 17, 32, 64, 256))), draw(st.integers(1, 3)),
        draw(st.integers(1, 3)), draw(st.sampled_from((16, KEY_DIM))), tuple(rows), draw(st.sampled_from((0, 0, 1, 20))),
        draw(st.booleans()), draw(st.sampled_from((0.0, 3.0))), draw(st.sampled_from((torch.int32, torch.int64))),
        draw(st.integers(0, 1000)),
    )


def sixteenths(*size: int, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers rounded to sixteenths, whose sums and sums of squares are exact in float32, in whatever order they are taken.

    The norm of a token is then the same alone and beside others. Of other numbers, a sum in another order may round to another 16-bit norm.
    """
    return torch.randn(*size, generator=generator).mul(16).round().div(16)


def by_hand(scheme: Scheme, slot: SlotSpec, x_TKD: torch.Tensor) -> torch.Tensor:
    """What a store reads back of tokens [T, K, D], rotated: each token through ``encode`` and ``decode`` alone."""
    rotation, found = scheme.rotation(slot), []
    for token in x_TKD:
        x = token[None, :, None]
        x = x if rotation is None else rotate(x, rotation.order, None)
        found.append(scheme.decode(scheme.encode(x), slot)[0, :, 0])
    return torch.stack(found) if found else x_TKD


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float, sink: float) -> tuple[torch.Tensor, float]:
    """One query [D] over tokens [T, D]: the result, and the log-sum of its scores."""
    scores = (k @ q) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    every = torch.cat((scores, torch.tensor([sink])))
    return torch.softmax(every, 0)[:-1] @ v if len(k) else torch.zeros(v.shape[1]), float(torch.logsumexp(every, 0))


def filled(case: Case) -> tuple[Pool, list[list[int]], list[torch.Tensor], list[torch.Tensor]]:
    """A pool with every row's tokens in blocks of random order, each row's blocks, and its keys and values."""
    generator = torch.Generator().manual_seed(case.seed)
    need = [math.ceil(tokens / case.page) for tokens, _ in case.rows]
    pool = kvcompile.pool(
        sum(need) + 2, case.heads, KEY_DIM, case.keys, values=case.values, value_dim=case.value_dim, page=case.page, dtype=torch.float32
    )
    pool.data.random_(0, 256, generator=generator)  # Whatever other requests left there.
    order, blocks, ks, vs = torch.randperm(sum(need) + 2, generator=generator).tolist(), [], [], []
    for (tokens, _), count in zip(case.rows, need, strict=True):
        blocks.append([order.pop() for _ in range(count)])
        ks.append(sixteenths(tokens, case.heads, KEY_DIM, generator=generator))
        vs.append(sixteenths(tokens, case.heads, case.value_dim, generator=generator))
        slots = torch.tensor([blocks[-1][t // case.page] * case.page + t % case.page for t in range(tokens)], dtype=torch.int64)
        before = pool.data.clone()
        pool.append(ks[-1], vs[-1], torch.full_like(slots, -1))
        assert torch.equal(pool.data, before), "skipped tokens wrote"
        mixed = torch.stack((torch.full_like(slots, -1), slots), 1).flatten()
        pool.append(*(x[-1].repeat_interleave(2, 0) if tokens else x[-1] for x in (ks, vs)), mixed)
        others = [block for block in range(len(pool.data)) if block not in blocks[-1]]
        assert torch.equal(pool.data[others], before[others]), "blocks of others were written"
    return pool, blocks, ks, vs


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(cases())
def test_operations_are_encode_and_decode_by_hand(case: Case) -> None:
    pool, blocks, ks, vs = filled(case)
    heads = case.heads * case.group
    widest = max(1, *map(len, blocks)) + 1
    table = torch.tensor([[*row, *[-7] * (widest - len(row))] for row in blocks], dtype=case.table)
    start = torch.tensor([0, *torch.tensor([count for _, count in case.rows]).cumsum(0).tolist()], dtype=case.table)
    q = torch.randn(int(start[-1]) + 1, heads, KEY_DIM, generator=torch.Generator().manual_seed(case.seed + 1))
    sinks = torch.linspace(-1, 2, heads) if case.sinks else None
    lengths = torch.tensor([tokens for tokens, _ in case.rows], dtype=case.table)
    out, lse = pool.attend(q, table, lengths, start, 5, scale=0.3, softcap=case.softcap, window=case.window, sinks=sinks)
    assert not out[-1].any() and bool(torch.isneginf(lse[-1]).all()), "padding behind the last row"
    layout = pool.layout
    rotations = [scheme.rotation(slot) for scheme, slot in ((layout.keys, layout.key_slot), (layout.values, layout.value_slot))]
    for row, (tokens, count) in enumerate(case.rows):
        k, v = by_hand(layout.keys, layout.key_slot, ks[row]), by_hand(layout.values, layout.value_slot, vs[row])
        for i in range(count):
            last = tokens - count + i
            first = max(0, last - case.window + 1) if case.window else 0
            for head in range(heads):
                at = int(start[row]) + i
                query = q[at, head] if rotations[0] is None else rotate(q[at, head].view(1, 1, 1, -1), rotations[0].order, None).flatten()
                seen = slice(first, last + 1), head // case.group
                sink = float(sinks[head]) if sinks is not None else -math.inf
                result, log = attended(query, k[seen], v[seen], 0.3, case.softcap, sink)
                result = result if rotations[1] is None else unrotate(result.view(1, 1, 1, -1), rotations[1].order, None).flatten()
                torch.testing.assert_close(out[at, head], result, atol=2e-5, rtol=2e-5)
                assert abs(float(lse[at, head]) - log) < 2e-5 * max(1, abs(log))


def test_rows_share_blocks() -> None:
    pool = kvcompile.pool(4, 2, 32, "int4", dtype=torch.float32)
    k, v = torch.randn(2, 48, 2, 32).unbind()
    pool.append(k, v, torch.arange(48))
    q = torch.randn(1, 2, 32).repeat(2, 1, 1)
    table = torch.tensor([[0, 1, 9], [0, 1, 2]])
    out, _ = pool.attend(q, table, torch.tensor([32, 40]), torch.tensor([0, 1, 2]), 1)
    for row, length in enumerate((32, 40)):
        alone, _ = pool.attend(q[:1], table[row : row + 1], torch.tensor([length]), torch.tensor([0, 1]), 1)
        torch.testing.assert_close(out[row], alone[0])
    assert not torch.equal(out[0], out[1])


def test_more_queries_than_promised_are_nan_and_no_guess() -> None:
    pool = kvcompile.pool(1, 1, 32, "int8", dtype=torch.float32)
    pool.append(*torch.randn(2, 3, 1, 32).unbind(), torch.arange(3))
    out, lse = pool.attend(torch.randn(3, 1, 32), torch.tensor([[0]]), torch.tensor([3]), torch.tensor([0, 3]), 2)
    assert bool(out[:2].isfinite().all()) and bool(out[2].isnan().all()) and bool(lse[2].isnan().all())


@pytest.mark.parametrize("kind", [kind for kind in registered() if kind.__module__.startswith("kvcompile.")], ids=lambda kind: kind.name)
def test_every_setting_of_every_scheme_is_held_or_refused(kind: type[Scheme]) -> None:
    """Of the package's own: a scheme of someone else, as other tests register, is judged by its layout alone."""
    held = {"dense", "int8", "fp8", "int4", "nf4", "gauss", "beyond", "int8-static", "fp8-static"}
    for scheme in kind.variants():
        options = vars(scheme)
        beside = options.get("window") or options.get("sinks") or options.get("pre_rope")
        alone = kind.name in held and not beside and options.get("granularity") is not Granularity.TENSOR
        if alone:
            layout = BlockLayout.of(scheme, 2, 64)
            assert layout_of(layout.text) == layout
            continue
        with pytest.raises(NotPaged, match="depend on that token alone"):
            BlockLayout.of(scheme, 2, 64)


@pytest.mark.parametrize(("scheme", "head_bytes"), [("dense", 16 * 512), ("int8", 16 * 260), ("int4", 16 * (128 + 16)), ("fp8", 16 * 260)])
def test_bytes_are_those_of_the_layouts_and_what_is_allocated(scheme: str, head_bytes: int) -> None:
    pool = kvcompile.pool(5, 8, 128, scheme)
    assert pool.layout.head_bytes == head_bytes and pool.data.untyped_storage().nbytes() == pool.nbytes == 5 * 8 * head_bytes
    made = parse(scheme)
    planned = sum(made.layout(SlotSpec(8, 128, torch.bfloat16, role)).bytes_per_token(8) for role in Role)
    assert pool.layout.token_bytes == planned


@hypothesis.given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.integers(16, 256))
def test_planes_are_aligned_and_lie_side_by_side(keys: str, values: str, page: int) -> None:
    layout = BlockLayout.of(keys, 1, 64, values=values, page=page)
    end = 0
    for place in (*layout.key_planes, *layout.value_planes):
        assert place.offset % 16 == 0 and 0 <= place.offset - end < 16
        end = place.offset + page * place.width * place.dtype.itemsize
    assert 0 <= layout.head_bytes - end < 16


def test_a_pool_of_measured_scales_has_them_and_its_name_says_so() -> None:
    scales = SiteScales(Scales(torch.tensor([0.01, 0.1])), Scales(torch.tensor([0.02])))
    scheme = StaticInt8(measured=True, scales=scales)
    pool, guessed = kvcompile.pool(1, 2, 32, scheme, dtype=torch.float32), kvcompile.pool(1, 2, 32, "int8-static", dtype=torch.float32)
    assert scales.key.digest in pool.layout.name and pool.layout.name != guessed.layout.name
    k, v = torch.rand(2, 4, 2, 32).unbind()
    pool.append(k, v, torch.arange(4))
    out, _ = pool.attend(torch.zeros(1, 2, 32), torch.tensor([[0]]), torch.tensor([4]), torch.tensor([0, 1]), 1)
    torch.testing.assert_close(out[0], ((v / 0.02).round() * 0.02).mean(0))
    keys, _ = pool.layout.planes(pool.data)
    assert torch.equal(keys[0][0, :, :4].transpose(0, 1).float(), (k / torch.tensor([0.01, 0.1])[:, None]).round().clamp(-127, 127))


def test_operations_meet_the_compiler() -> None:
    pool = kvcompile.pool(3, 2, 32, "int4", dtype=torch.float32)
    k, v = torch.randn(2, 20, 2, 32).unbind()
    arguments = torch.randn(1, 4, 32), torch.tensor([[1, 2]]), torch.tensor([20]), torch.tensor([0, 1])

    def step(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool.append(k, v, slots)
        return pool.attend(*arguments, 1)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, torch.arange(20) + 16)
    written = pool.data.clone()
    pool.data.zero_()
    want = step(k, v, torch.arange(20) + 16)
    assert torch.equal(written, pool.data)
    torch.testing.assert_close(got, want)
    tables = pool.layout.text, [], []
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(operations.paged_append, (k, v, pool.data, torch.arange(20), *tables), test_utils=asked)
    torch.library.opcheck(operations.paged_attend, (arguments[0], pool.data, *arguments[1:], 1, *tables, 0.5), test_utils=asked)


@pytest.mark.parametrize(("wrong", "expected"), [
    ({"page": 8}, "page"), ({"page": 257}, "page"), ({"dtype": torch.float64}, "dtype"), ({"heads": 0}, "heads"), ({"blocks": 0}, "blocks"),
])
def test_wrong_sizes_are_named(wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(BadBlock, match=f"expects {expected} to be"):
        kvcompile.pool(**{"blocks": 1, "heads": 1, "head_dim": 32, **wrong})


def test_wrong_operands_are_named() -> None:
    pool = kvcompile.pool(2, 2, 32, "int8", dtype=torch.float32)
    k, q, one = torch.zeros(3, 2, 32), torch.zeros(1, 4, 32), torch.tensor([1])
    start, table = torch.tensor([0, 1]), torch.tensor([[0]])
    wrong = (
        ("k to be", lambda: pool.append(k.half(), k, torch.arange(3))), ("v to be", lambda: pool.append(k, k[..., :16], torch.arange(3))),
        ("slots to be", lambda: pool.append(k, k, torch.zeros(3))), ("q to be", lambda: pool.attend(q[:, :3], table, one, start, 1)),
        ("block_table to be", lambda: pool.attend(q, table.float(), one, start, 1)),
        ("query_start to be", lambda: pool.attend(q, table, one, one, 1)),
        ("pool to be", lambda: dataclasses.replace(pool, data=pool.data[:, :1]).append(k, k, torch.arange(3))),
    )
    for text, call in wrong:
        with pytest.raises(KvcompileError, match=text):
            call()
    with pytest.raises(IndexError):
        pool.append(k, k, torch.tensor([0, 1, 32]))
    for block in (-1, 2):
        with pytest.raises(IndexError):
            pool.attend(q, torch.tensor([[block]]), one, start, 1)
