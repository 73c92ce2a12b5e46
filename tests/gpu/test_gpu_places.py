"""Rows out of order on a GPU, where no step looks: NaN at once, said by whoever reads, with CUDA graphs and without, and no wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_llama import gpu_config, gpu_model
from test_row_places import even, indexed, rows, shared
from test_unlooked_places import ALL, WINDOWED, Buffers, Pair, is_broken, play, refusal

import kvcompile
from benchmarks.fuzz.choices import drawn
from benchmarks.fuzz.corpus import UNLOOKED
from benchmarks.fuzz.trial import Found, Way, tried

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = ("default", "reduce-overhead")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing is compiled before."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Fail where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("write", [indexed, shared])
@pytest.mark.parametrize("scheme", WINDOWED)
def test_a_row_is_right_or_nan_from_the_call_on_that_breaks_its_order(scheme: str, write: Any) -> None:
    assert play(Pair(scheme, "inductor", device="cuda"), write) > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["one accepts a draft", "an old token again", "a far jump", "a row begins anew", "a second request"])
@pytest.mark.parametrize("scheme", WINDOWED)
def test_buffers_of_a_module_with_cuda_graphs(scheme: str, name: str, mode: str) -> None:
    backend, random = kvcompile.backend(scheme), torch.Generator().manual_seed(0)
    module = Buffers(indexed, "cuda")
    call, plain = torch.compile(module, backend=backend, dynamic=False, mode=mode), Buffers(indexed, "cuda")
    calls = list(ALL[name])
    # Enough steps for a graph to be recorded and played.
    calls += [rows(*[int(calls[-1][row, -1]) + 1 + step for row in range(2)]) for step in range(5)]
    with torch.no_grad():
        for index, pos in enumerate(calls):
            q, k, v = (torch.randn(2, 1, pos.shape[1], 32, generator=random).cuda() for _ in "qkv")
            tokens = q / 6, (k > 0).float(), (v > 0).float()
            torch.compiler.cudagraph_mark_step_begin()
            found = call(*tokens, pos.cuda()).clone()
            expected = plain(*tokens, pos.cuda())
            for row in range(2):
                said = Pair.said(expected[row], found[row])
                assert said == ("NaN" if is_broken(row, calls[: index + 1]) else "right"), (index, row)
    broken = [row for row in range(2) if is_broken(row, calls)]
    report = backend.report()
    assert report.sites and all(f" of row {row}, found " in line for row, line in zip(broken, report.disorder, strict=True))


@pytest.mark.parametrize("scheme", ["int8", "beyond", "smartkv"])
def test_schemes_without_a_window_take_any_order(scheme: str) -> None:
    pair = Pair(scheme, "inductor", device="cuda")
    for name in ("one back", "reversed chunk", "swapped draft", "a second request"):
        pair.begin()
        for pos in ALL[name]:
            assert pair.step(shared, pos) == ["right", "right"], name
        assert (kvcompile.decoded(pair.own[0]) - pair.plain[0]).abs().max() < 0.03, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", ["kivi(bits=4)", "squat(bits=4,rotate=none)", "certified"])
def test_a_counter_that_nobody_saw_move(scheme: str, mode: str) -> None:
    """Through ``.data``, which no version counts: NaN, and one line for all layers; the next request is as right as ever."""
    config = gpu_config()
    model, backend = gpu_model(config), kvcompile.backend(scheme, strict=True)
    call = torch.compile(model, backend=backend, fullgraph=True, mode=mode)
    cache = transformers.StaticCache(config, max_cache_len=256)
    ids = torch.randint(0, 512, (2, 40), device="cuda")

    def step(tokens: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return call(tokens, past_key_values=cache).logits.clone()

    with torch.no_grad():
        step(ids)
        for _ in range(4):
            assert step(ids[:, :1]).isfinite().all()
        for layer in cache.layers:
            layer.cumulative_length.data.add_(1)
        with no_waits():
            broken = [step(ids[:, :1]) for _ in range(4)]
        assert all(logits.isnan().all() for logits in broken)
        disorder = backend.report().disorder
        assert [f"at position 44 of row {row}, found one at position 45" in line for row, line in enumerate(disorder)] == [True, True]
        assert "expected a token at position 44 of row 0" in str(refusal(cache.layers[0].keys))
        cache.reset()
        gc.collect()
        assert step(ids).isfinite().all()
        assert step(ids[:, :1]).isfinite().all()
        assert backend.report().disorder == []


@pytest.mark.parametrize("scheme", [*WINDOWED, "int8"])
def test_a_step_waits_for_nothing_in_order_or_not(scheme: str) -> None:
    pair = Pair(scheme, "inductor", device="cuda")
    for pos in (even(0, 20), even(20, 1), even(21, 1)):
        pair.step(shared, pos)
    q, k, v = pair.tokens(1)
    places = [even(at, 1).cuda() for at in (22, 23, 30, 31)]
    with torch.no_grad(), no_waits():
        for pos in places:
            pair.call(shared, q, k, v, *pair.own, pos)


@pytest.mark.parametrize(("given", "found"), UNLOOKED)
def test_programs_of_the_fuzzer(given: dict[str, str], found: str) -> None:
    result = tried(1, given, Way("inductor", "cuda"))
    assert result.found is Found[found], result.said


def test_a_mask_over_what_nobody_wrote_behind_a_prompt_with_a_place_written_twice() -> None:
    result = tried(300025, drawn(300025), Way("inductor", "cuda"))
    assert result.found in {Found.RIGHT, Found.REFUSED}, result.said


def shared_limits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, pos: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """Write and attend: all queries see up to the furthest one, each row from a place of its own on."""
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    t = torch.arange(kc.shape[2], device=kc.device)
    seen = (t <= pos.max()) & (t >= first[:, None, None, None])
    return torch.nn.functional.scaled_dot_product_attention(q, kc, vc, attn_mask=seen.expand(-1, 1, q.shape[2], -1))


@pytest.mark.parametrize("counts", [(5, 1, 5), (40, 1, 3)], ids=["short", "long"])
@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)", "certified", "smartkv"])
def test_limits_that_queries_of_a_prompt_share(scheme: str, counts: tuple[int, ...]) -> None:
    """A kernel reads a limit for each query: of a single one it would read what lies behind it."""
    call = torch.compile(shared_limits, backend=kvcompile.backend(scheme, strict=True))
    random, begin = torch.Generator().manual_seed(0), 0
    plain, own = ([torch.zeros(2, 1, 64, 32, device="cuda") for _ in "kv"] for _ in "ab")
    first = torch.tensor([0, 2], device="cuda")
    for count in counts:
        q, k, v = (torch.randn(2, 1, count, 32, generator=random) for _ in "qkv")
        tokens = [item.to("cuda") for item in (q, (k > 0).float(), (v > 0).float())]
        pos = torch.arange(begin, begin + count, device="cuda")
        with torch.no_grad():
            expected, found = shared_limits(*tokens, *plain, pos, first), call(*tokens, *own, pos, first)
        assert (expected - found).abs().max() < 0.03, count
        begin += count
