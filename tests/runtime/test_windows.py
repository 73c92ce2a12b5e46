"""Schemes with windows: blocks that wait for their last token, padding that sets no scale, rollbacks, order.

Laws are on the write path itself; the models at the end show that the graphs around it keep them.
"""

from __future__ import annotations

import pytest
import torch
from registry import VARIANTS
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvcompile
from kvcompile.errors import TokensOutOfOrder, WindowPassed
from kvcompile.extensions.certified.scheme import ORIGINALS
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.ops.operations import as_tokens
from kvcompile.runtime.store.codec import decode
from kvcompile.runtime.store.exact_window import disorder, rewind
from kvcompile.runtime.store.store import Store, StoreSpec
from kvcompile.schemes import Scheme, parse
from kvcompile.testing.samples import normal, unwritten
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = [scheme for scheme in VARIANTS if scheme.window and getattr(scheme, "scale_dtype", torch.float16) == torch.float16]
each_windowed = pytest.mark.parametrize("scheme", WINDOWED, ids=lambda scheme: scheme.spec())
HEADS, WIDTH = 2, 64


def store(scheme: Scheme, batch: int = 1, pages: int = 5) -> Store:
    """An empty store of keys."""
    spec = SlotSpec(HEADS, WIDTH, torch.float32, Role.KEY)
    held = Store(StoreSpec(spec, scheme, scheme.layout(spec)), batch, torch.device("cpu"), pages)
    for plane, described in zip(held.planes, held.spec.layout.planes, strict=True):
        if described.name in scheme.calibrated:
            plane.copy_(unwritten(scheme, spec, described, pages, 1))
    return held


def write(held: Store, x: torch.Tensor, start: int, origin: torch.Tensor | None = None) -> torch.Tensor:
    """Append at ``start``; the newest tokens."""
    pos = torch.arange(start, start + x.shape[2]).unsqueeze(0)
    return append_window_body(x, held.planes[: held.spec.layout.written], pos, origin, held.spec.scheme.spec())[0]


def test_the_newest_tokens_decode_to_what_they_were() -> None:
    held, x = store(parse("kivi(group=16,window=16)").for_role(Role.KEY), batch=2), normal(2, HEADS, 21, WIDTH)
    write(held, x, 0)
    found = decode(held, 21)
    assert torch.equal(found[:, :, 5:], x[:, :, 5:]) and not torch.equal(found[:, :, :5], x[:, :, :5])


def test_the_row_whose_tokens_came_out_of_order_is_named() -> None:
    held = store(parse("kivi(group=16,window=16)").for_role(Role.KEY), batch=3)
    x = torch.randn(3, HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[0], [0], [0]]), torch.tensor([[1], [5], [1]])
    for pos in places:
        append_window_body(x, held.planes[: held.spec.layout.written], pos, None, held.spec.scheme.spec())
    (found,) = disorder(held, "here")
    assert found.facts["row"] == 1 and [error.facts["row"] for error in disorder(held, "here", row=4)] == [5]
    with pytest.raises(TokensOutOfOrder, match="of row 1"):
        decode(held, 2)
    assert not list(disorder(store(parse("int8")), "here")), "without a window tokens come in any order"


def codes_of(held: Store) -> list[torch.Tensor]:
    """The planes that attention decodes."""
    return held.planes[: held.spec.scheme.format(held.spec.slot).planes]


def same(a: Store, b: Store) -> bool:
    """Whether two stores hold the same bytes."""
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.planes, b.planes, strict=True))


@each_windowed
def test_any_pieces_make_the_same_store(scheme: Scheme) -> None:
    window = scheme.window
    for tokens in {1, window - 1, window, window + 1, 3 * window + 5}:
        x = normal(1, HEADS, tokens, WIDTH, seed=tokens)
        once = store(scheme)
        write(once, x, 0)

        for generator in (torch.Generator().manual_seed(seed) for seed in range(4)):
            pieces, at = store(scheme), 0
            while at < tokens:
                count = min(int(torch.randint(1, max(2, tokens // 2), (), generator=generator)), tokens - at)
                recent = write(pieces, x[:, :, at : at + count], at)
                at += count
                seen = min(at, window + count)
                assert torch.equal(recent[:, :, -seen:], x[:, :, at - seen : at])
            assert same(once, pieces)


@each_windowed
def test_a_padded_row_holds_what_it_would_hold_alone(scheme: Scheme) -> None:
    window, tokens = scheme.window, 2 * scheme.window + 7
    x = normal(3, HEADS, tokens + 3, WIDTH)
    origin = torch.tensor([0, 5, tokens - 1])
    x[1, :, :5], x[2, :, : tokens - 1] = 1e4, float("nan")  # Padding may be anything.
    padded = store(scheme, 3)
    write(padded, x[:, :, :tokens], 0, origin)
    for step in range(3):
        recent = write(padded, x[:, :, tokens + step : tokens + step + 1], tokens + step, origin)
    for row, first in enumerate(origin.tolist()):
        alone = store(scheme)
        write(alone, x[row : row + 1, :, first:tokens], 0)
        for step in range(3):
            last = write(alone, x[row : row + 1, :, tokens + step : tokens + step + 1], tokens + step - first)
        known = min(window + 1, tokens + 3 - first)
        assert torch.equal(recent[row, :, -known:], last[0, :, -known:])
        blocks = (tokens + 3 - first) // scheme.block * scheme.block
        assert torch.equal(decode(padded, tokens + 3)[row, :, first:], decode(alone, tokens + 3 - first)[0])
        for a, b, plane in zip(codes_of(padded), codes_of(alone), scheme.layout(alone.spec.slot).planes, strict=False):
            if plane.constant:
                continue
            rows = blocks * plane.rows // 64
            assert torch.equal(a[:, row].transpose(0, 1).flatten(1, 2)[:, :rows], b[:, 0].transpose(0, 1).flatten(1, 2)[:, :rows])


@each_windowed
def test_going_back_is_as_if_the_rest_had_never_been(scheme: Scheme) -> None:
    window, block = scheme.window, scheme.block
    x, other = normal(1, HEADS, 4 * window, WIDTH), normal(1, HEADS, 9, WIDTH, seed=9)
    for wanted in (0, 1, 3 * window - 1, 3 * window, 3 * window + 3, 4 * window - 1):
        for tokens in {wanted + 1, wanted + window - block + 1, 4 * window}:
            if tokens > 4 * window:
                continue
            held = store(scheme)
            write(held, x[:, :, :tokens], 0)
            if wanted % block and tokens - wanted > window - wanted % block and not held.keeps_originals:
                with pytest.raises(WindowPassed, match=f"length {wanted} ends inside a block of {block}"):
                    rewind(held, wanted)
                continue
            rewind(held, wanted)
            recent = write(held, other, wanted)
            straight = store(scheme)
            if wanted:
                write(straight, x[:, :, :wanted], 0)
            exact = write(straight, other, wanted)
            # What had left the window comes back as what its codes stand for, or from the originals; the rest is what it was.
            left = max(0, min(tokens - wanted, window))
            assert torch.equal(recent[:, :, left:], exact[:, :, left:])
            lost = range(max(0, window - wanted), left)
            codes = tuple(as_tokens(plane) for plane in codes_of(straight))
            kept = any(plane.name == ORIGINALS for plane in straight.spec.layout.planes)
            decoded = x if kept else straight.spec.scheme.decode(codes, straight.spec.slot)
            for row in lost:
                assert torch.equal(recent[:, :, row], decoded[:, :, wanted - window + row])
            for a, b, plane in zip(codes_of(held), codes_of(straight), scheme.layout(held.spec.slot).planes, strict=False):
                rows = (wanted + 9) // block * block * plane.rows // 64
                flat = [p[:, 0].transpose(0, 1).flatten(1, 2)[:, :rows] for p in (a, b)]
                assert torch.equal(*flat)


@each_windowed
def test_what_comes_out_of_order_is_never_a_number(scheme: Scheme) -> None:
    x = normal(1, HEADS, 40, WIDTH)
    held = store(scheme)
    write(held, x, 0)
    assert torch.isnan(write(held, x[:, :, :2], 43)[:, :, -2:]).all()
    held = store(scheme)
    write(held, x, 0)
    pos = torch.tensor([[40, 42]])
    recent, _ = append_window_body(x[:, :, :2], held.planes[: held.spec.layout.written], pos, None, scheme.spec())
    assert torch.equal(recent[:, :, -2], x[:, :, 0])
    assert torch.isnan(recent[:, :, -1]).all()
    # Padding that is shown later was never stored.
    held = store(scheme)
    write(held, x, 0, torch.tensor([3]))
    assert torch.isfinite(write(held, x[:, :, :1], 40, torch.tensor([4]))).all()
    assert torch.isnan(write(held, x[:, :, :1], 41, torch.tensor([2]))[:, :, -1]).all()
    assert torch.isnan(write(held, x[:, :, :1], 42)[:, :, -1]).all()


def test_a_new_start_needs_no_reset() -> None:
    scheme = parse("kivi").for_role(Role.KEY)
    x = normal(1, HEADS, 50, WIDTH)
    held, clean = store(scheme), store(scheme)
    write(held, -x, 0)
    write(held, x[:, :, :33], 0)
    write(clean, x[:, :, :33], 0)
    assert torch.equal(decode(held, 33), decode(clean, 33))


@each_windowed
def test_rows_go_back_each_to_its_own_token(scheme: Scheme) -> None:
    """A row that holds fewer tokens than it is asked to go back to stays as it is."""
    tokens, block = 2 * scheme.window, scheme.block
    x = normal(3, HEADS, tokens + 1, WIDTH)
    together = store(scheme, 3)
    write(together, x[:, :, :tokens], 0, torch.tensor([0, 0, tokens - 3]))
    rewind(together, torch.tensor([tokens - block, tokens + 5, 0]))
    for row, (count, first) in enumerate(((tokens - block, 0), (tokens, 0), (0, 0))):
        alone = store(scheme)
        if tokens - first:
            write(alone, x[row : row + 1, :, :tokens], 0)
        rewind(alone, count)
        assert torch.equal(decode(together, tokens)[row], decode(alone, tokens)[0])


# --- in a model ----------------------------------------------------------------------------------------


def tiny() -> tuple[LlamaConfig, LlamaForCausalLM]:
    """A random model of one layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        max_position_embeddings=256,
    )
    return config, LlamaForCausalLM(config).eval()


def generate(
    model: LlamaForCausalLM, cache: StaticCache | DynamicCache, ids: torch.Tensor, mask: torch.Tensor, eager_prefill: bool, steps: int = 36
) -> torch.Tensor:
    """Logits [steps, B, vocabulary] of fixed tokens after a prompt, with kivi."""
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend=kvcompile.backend("kivi", inner="eager", strict=True))
    logits = []
    with torch.no_grad():
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        for step in range(steps):
            call = model if eager_prefill and not step else compiled
            out = call(input_ids=ids, past_key_values=cache, use_cache=True, attention_mask=mask, position_ids=position)
            logits.append(out.logits[:, -1])
            ids, mask = torch.full_like(ids[:, :1], step * 7 % 100), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            position = position[:, -1:] + 1
    return torch.stack(logits)


@pytest.mark.parametrize(("static", "eager_prefill"), [(True, False), (False, True)], ids=["static-compiled", "dynamic-adopted"])
def test_left_padding_equals_single_runs(static: bool, eager_prefill: bool) -> None:
    config, model = tiny()
    ids, mask = torch.randint(0, 100, (2, 45)), torch.ones(2, 45, dtype=torch.int64)
    mask[1, :39] = 0

    def cache() -> StaticCache | DynamicCache:
        return StaticCache(config=config, max_cache_len=100) if static else DynamicCache(config=config)

    together = generate(model, cache(), ids, mask, eager_prefill)
    for row in range(2):
        first = 45 - int(mask[row].sum())
        alone = generate(model, cache(), ids[row : row + 1, first:], mask[row : row + 1, first:], eager_prefill)
        assert (together[:, row] - alone[:, 0]).abs().max() < 1e-5


def test_crop_of_a_dynamic_cache_goes_back_or_says_why_not() -> None:
    config, model = tiny()
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend=kvcompile.backend("kivi", inner="eager", strict=True))
    ids = torch.randint(0, 100, (1, 45))
    with torch.no_grad():
        cache = compiled(input_ids=ids, past_key_values=DynamicCache(config=config), use_cache=True).past_key_values
        step = compiled(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        for token in ids[0, :5]:
            compiled(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        cache.crop(-6)
        again = compiled(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).logits
        # The tokens that had left the window are codes now, so the logits are those of a model with fewer exact tokens.
        assert (again - step).abs().max() < 0.3 * step.std()
        for token in ids[0]:
            compiled(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        cache.crop(-42)
        with pytest.raises(WindowPassed, match="crop by at most 1 tokens"):
            compiled(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
