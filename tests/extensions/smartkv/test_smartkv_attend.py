"""smartkv's attention: the result of ``attend`` over what the buckets decode to, and averages as their definition has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.extensions.smartkv import attend as room
from kvcompile.extensions.smartkv import buckets, codes, moves
from kvcompile.extensions.smartkv.importance import Measure, head_measure
from kvcompile.schemes import Smartkv, make, parse
from kvcompile.types import PAGE, Extent, Role, SlotSpec, pages_for

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, K, D, T = 3, 4, 2, 16, 150
assert kvcompile.backend  # the package registers the operations


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planes(x: torch.Tensor, scheme: Smartkv, role: Role, settled: int, seed: int) -> list[torch.Tensor]:
    """Planes of a store of the tokens of ``x``, the first ``settled`` of them at widths by chance."""
    scheme = scheme.for_role(role)
    spec = SlotSpec(x.shape[1], x.shape[3], torch.float32, role)
    layout = scheme.layout(spec)
    made: Any = tuple(torch.zeros(plane.shape(0, x.shape[0], x.shape[1]), dtype=plane.dtype) for plane in layout.planes)

    def enter(made: Any, first: int, last: int) -> Any:
        made = scheme.with_room(made, first, last)
        at = torch.arange(last - first)
        for plane, rows in zip(made, codes.encode(x[:, :, first:last], 8), strict=False):
            plane[at // PAGE, :, :, at % PAGE] = rows.permute(2, 0, 1, 3)
        return made

    made = enter(made, 0, settled)
    half = buckets.Buckets.of(made, scheme.form)
    if half.mean is not None:
        half.mean.normal_(generator=generator(seed + 9))
    # The levels of keys and values are one.
    chosen = torch.randint(0, len(scheme.levels), (x.shape[0], settled), generator=generator(77))
    made = (*moves.settled(half, chosen.to(torch.int8)).planes, *made[len(half.planes) :])
    return list(enter(made, settled, x.shape[2]))


class Case:
    """One site: queries, planes of keys and values, and the decoded tokens."""

    def __init__(
        self, queries: int, scheme: Smartkv | None = None, seed: int = 0, settled: int = 100, dim: int = D, heads: int = H
    ) -> None:
        self.scheme = scheme or make("smartkv")  # type: ignore[assignment]
        self.q = 2 * torch.randn(B, heads, queries, dim, generator=generator(seed)) * (D / dim) ** 0.5
        k, v = (torch.randn(B, K, T, dim, generator=generator(seed + side)) for side in (1, 2))
        self.keys, self.values = planes(k, self.scheme, Role.KEY, settled, seed), planes(v, self.scheme, Role.VALUE, settled, seed + 3)
        spec = SlotSpec(K, dim, torch.float32, Role.KEY)
        count = self.scheme.for_role(Role.KEY).planes_read(spec)
        self.keys, self.written = self.keys[:count], self.keys[count:]
        self.importance, _, self.heads, _ = self.written
        self.hi = (T - queries + torch.arange(queries)).unsqueeze(0)

    def spec(self, role: Role) -> str:
        return self.scheme.for_role(role).spec()

    def attend(self, hi: torch.Tensor | None = None, **masks: Any) -> torch.Tensor:
        given = [masks.get(name) for name in ("lo", "keep", "bias", "sinks")]
        softcap, texts = masks.get("softcap", 0.0), (self.spec(Role.KEY), self.spec(Role.VALUE))
        return room.smartkv_attend(
            self.q, self.keys, self.values, self.hi if hi is None else hi, *given, *texts, 0.3, softcap, self.q.shape[3],
            self.importance, self.heads,
        )

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        halves = zip((self.keys, self.values), Role, strict=True)
        k, v = (buckets.values(buckets.Buckets.of(tuple(planes), self.scheme.for_role(role).form), T) for planes, role in halves)
        return k, v

    def dense(self, **masks: Any) -> torch.Tensor:
        k, v = self.decoded()
        given = [masks.get(name) for name in ("lo", "keep", "bias", "sinks")]
        return torch.ops.kvcompile.attend(
            self.q, [k.unsqueeze(0)], [v.unsqueeze(0)], self.hi, *given, "dense()", "dense()", 0.3, masks.get("softcap", 0.0), D,
        )


def masks(queries: int) -> dict[str, dict[str, Any]]:
    chance = torch.rand(B, 1, queries, T, generator=generator(8))
    return {
        "none": {},
        "lo": {"lo": (T - queries - 40 + torch.arange(queries)).unsqueeze(0)},
        "keep": {"keep": torch.arange(T)[None] >= torch.tensor([[17], [0], [3]])},
        "short keep": {"keep": torch.arange(T - 20)[None] >= torch.tensor([[17], [0], [3]])},
        "bool bias": {"bias": chance > 0.4},
        "float bias": {"bias": torch.where(chance > 0.4, chance, float("-inf"))},
        "one row of bias": {"bias": chance[:, :, :1]},
        "bias by head": {"bias": torch.randn(1, H, queries, T, generator=generator(7))},
        "sinks": {"sinks": torch.tensor([0.5, 3.0, -2.0, 1.0])},
        "softcap": {"softcap": 2.0},
    }


@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("mask", list(masks(1)))
def test_result_is_that_of_attend_over_the_decoded_tokens(mask: str, queries: int) -> None:
    case, given = Case(queries), masks(queries)[mask]
    assert torch.allclose(case.attend(**given), case.dense(**given), atol=1e-6)


@pytest.mark.parametrize("settled", [1, 64, T])
def test_wherever_the_buckets_end(settled: int) -> None:
    case = Case(3, settled=settled)
    assert torch.allclose(case.attend(), case.dense(), atol=1e-6)


def rows_of(case: Case) -> torch.Tensor:
    """The plane of importance as [B, T, 2]."""
    return case.importance[:, :, 0].transpose(0, 1).flatten(1, 2)[:, :T]


def defined(case: Case, scheme: Smartkv, **given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain and weighted importance [B, T] and averages of heads [B, K], query by query from whole softmax rows, float64."""
    k, _ = case.decoded()
    scores = (case.q.double() @ k.double().repeat_interleave(H // K, 1).transpose(-1, -2)) * 0.3
    t = torch.arange(T)
    seen = (t <= case.hi[:, None, :, None]).expand(B, H, -1, -1)
    if "keep" in given:
        seen = seen & given["keep"][:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    plain, by_heads, heads = torch.zeros(B, T).double(), torch.zeros(B, T).double(), torch.ones(B, K).double()
    for query in range(case.q.shape[2]):
        each = weights[:, :, query]
        visible = seen[:, 0, query]
        of_heads = each.unflatten(1, (K, -1)).unbind(1)
        measure = torch.stack([head_measure(one, scheme.measure, visible).mean(-1) for one in of_heads], -1)
        heads = scheme.head_decay * heads + (1 - scheme.head_decay) * measure
        mass = each.unflatten(1, (K, -1)).mean(2)
        plain = scheme.decay * plain + (1 - scheme.decay) * mass.mean(1)
        by_heads = scheme.decay * by_heads + (1 - scheme.decay) * (heads.unsqueeze(-1) * mass).mean(1)
    return plain, by_heads, heads


@pytest.mark.parametrize("measure", list(Measure))
@pytest.mark.parametrize("queries", [1, 130])
def test_averages_are_as_defined(measure: Measure, queries: int) -> None:
    scheme = Smartkv(measure=measure, decay=0.97, head_decay=0.9)
    case, given = Case(queries, scheme), {"keep": torch.arange(T)[None] >= torch.tensor([[17], [0], [3]])}
    case.attend(**given)
    plain, by_heads, heads = defined(case, scheme, **given)
    found = rows_of(case)
    seen = plain > 0
    assert torch.allclose(found[..., 0].double()[seen], plain[seen], rtol=1e-4, atol=1e-9)
    assert torch.allclose(found[..., 1].double(), by_heads, rtol=1e-4, atol=1e-9)
    assert torch.allclose(case.heads[0, :, :, 0, 0].double(), heads, rtol=1e-4)
    assert not found[0, :17].any(), "padding got something"
    assert (found[..., 0] > 0).equal(seen)


def test_a_prompt_in_pieces_leaves_what_it_leaves_at_once() -> None:
    whole, pieces = Case(90), Case(90)
    out = whole.attend()
    q, parts = pieces.q, []
    for start, stop in ((0, 50), (50, 51), (51, 90)):
        pieces.q = q[:, :, start:stop]
        parts.append(pieces.attend(hi=whole.hi[:, start:stop]))
    assert torch.allclose(torch.cat(parts, 2), out, atol=1e-6)
    assert torch.allclose(pieces.importance, whole.importance, rtol=1e-4, atol=1e-9)
    assert torch.allclose(pieces.heads, whole.heads, rtol=1e-4)


def test_queries_that_count_for_nothing_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Smartkv(decay=0.5, head_decay=0.6)
    looked: list[int] = []
    add = room._Averages.add

    def counted(self: Any, start: int, *rest: Any) -> None:
        looked.append(start)
        add(self, start, *rest)

    short, long = Case(130, scheme), Case(130, scheme)
    monkeypatch.setattr(room, "COUNTS", 0.0 + 2.0**-1000)
    long.attend()
    monkeypatch.setattr(room, "COUNTS", 2.0**-30)
    monkeypatch.setattr(room._Averages, "add", counted)
    short.attend()
    assert set(looked) == {64, 128}, "41 queries of 130 count, which begin in the second tile"
    assert torch.allclose(short.importance[..., :2], long.importance[..., :2], atol=1e-8)


def test_a_prompt_is_observed_as_it_would_be_attended_to() -> None:
    x = torch.randn(B, K, T, D, generator=generator(3))
    scheme = make("smartkv").for_role(Role.KEY)
    importance, heads = torch.zeros(pages_for(T), B, 1, PAGE, 2), torch.zeros(1, B, K, 1, 1)
    q, hi = torch.randn(B, H, T, D, generator=generator(4)), torch.arange(T).unsqueeze(0)
    given = [q, [x.unsqueeze(0)], [x.unsqueeze(0)], hi, None, None, None, None, "dense()", "dense()", 0.3, 0.0, D]
    room.smartkv_observe(*given, importance, heads, scheme.spec())
    weights = torch.softmax((q @ x.repeat_interleave(2, 1).mT * 0.3).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")), -1)
    decay = 0.1 * 0.9 ** torch.arange(T - 1, -1, -1.0)
    plain = torch.einsum("s,bhst->bt", decay, weights) / H
    found = importance[:, :, 0].transpose(0, 1).flatten(1, 2)
    assert torch.allclose(found[:, :T, 0], plain, rtol=1e-3, atol=1e-9)
    assert not found[:, T:].any()


def test_a_head_that_is_not_finite_leaves_no_nan_behind() -> None:
    case = Case(2)
    case.q[1, 2, 0, 3] = float("nan")
    assert case.attend()[1, 2, 0].isnan().all()
    assert case.importance.isfinite().all() and case.heads.isfinite().all()
    assert (rows_of(case)[1, :100, 0] > 0).all()


def test_nothing_is_as_large_as_queries_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that any operation makes for 1,000 queries over as many tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.most = max(self.most, out.numel())
            return out

    tokens = 1000
    x = torch.randn(1, 1, tokens, D, generator=generator(3))
    importance, heads = torch.zeros(pages_for(tokens), 1, 1, PAGE, 2), torch.zeros(1, 1, 1, 1, 1)
    hi = torch.arange(tokens).unsqueeze(0)
    given = [x, [x.unsqueeze(0)], [x.unsqueeze(0)], hi, None, None, None, None, "dense()", "dense()", 0.3, 0.0, D]
    with Largest() as largest:
        room.smartkv_observe_body(*given, importance, heads, make("smartkv").for_role(Role.KEY).spec())
    assert 64 * tokens <= largest.most <= 64 * tokens * 2 < tokens * tokens / 4


def test_planes_are_those_of_the_layout() -> None:
    scheme = parse("smartkv").for_role(Role.KEY)
    spec = SlotSpec(K, D, torch.float32, Role.KEY)
    names = [plane.name for plane in scheme.layout(spec).planes]
    assert names[-4:] == ["importance", "before", "heads", "decided"] and scheme.planes_read(spec) == len(names) - 4
    assert math.isclose(scheme.bits_per_value(spec), 6.4)
    assert all(plane.tally for plane in scheme.layout(spec).planes if plane.extent is not Extent.TOKENS)
