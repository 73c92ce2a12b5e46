"""squat's guard: heads that error feedback would harm have kivi's codes, by hand and in a graph."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from gpu_llama import gpu_config, narrow_model
from test_squat import WIDTH, attention, compiled, correlated, keys_of, keys_store, slot
from transformers import StaticCache

import kvcompile
from kvcompile import schemes
from kvcompile.extensions.squat import guard
from kvcompile.extensions.squat.scheme import Subspace
from kvcompile.schemes import Kivi, Squat
from kvcompile.schemes.rotation import rotate
from kvcompile.testing.samples import normal
from kvcompile.types import Role

pytestmark = pytest.mark.usefixtures("one_thread")


def turncoat(rows: int, seed: int = 0) -> torch.Tensor:
    """Queries [rows, D] of a few directions, and from three quarters on of others."""
    head, tail = (correlated(rows, WIDTH, 3, seed=seed + index) for index in (0, 1))
    return torch.cat([head[: rows * 3 // 4], tail[rows * 3 // 4 :]])


@pytest.mark.parametrize("subspace_", list(Subspace))
def test_a_head_that_feedback_would_harm_has_none(subspace_: Subspace) -> None:
    """The first head's queries turn away from what they taught, the second's do not: its codes are kivi's, the other's are better."""
    scheme = keys_of(lam=100.0, subspace=subspace_)
    q = torch.stack([turncoat(400), correlated(400, WIDTH, 3, seed=9)])[None, :, None]
    x = normal(1, 2, 256, WIDTH)
    (unguarded,) = dataclasses.replace(scheme, guard=False).calibrate(q, None, schemes.Prompt(x))
    (plane,) = scheme.calibrate(q, None, schemes.Prompt(x))
    assert unguarded[0, 0, 0].any(), "the first head has a correction to decline"
    assert not plane[0, 0, 0].any() and plane[0, 0, 0].signbit().all()
    assert torch.equal(plane[0, 0, 1], unguarded[0, 0, 1])
    plain, guarded = Kivi().for_role(Role.KEY).encode(x), scheme.encode(x, plane)
    for a, b in zip(plain, guarded, strict=True):
        assert torch.equal(a[:, 0], b[:, 0]) and not torch.equal(a[:, 1], b[:, 1])
    last = q[0, :, 0, 300:]
    errors = [
        (scheme.decode(planes, slot()) - x)[0] @ last.mT for planes in (plain, guarded, scheme.encode(x, learned_early(scheme, q)))
    ]
    kivi, ours, tried = (each.flatten(1).norm(dim=-1) for each in errors)
    assert tried[0] > kivi[0] and ours[0] == kivi[0] and ours[1] < 0.7 * kivi[1]


def learned_early(scheme: Squat, q: torch.Tensor) -> torch.Tensor:
    """The plane of the first three quarters of queries alone."""
    return dataclasses.replace(scheme, guard=False).calibrate(q[..., :300, :], None)[0]


@pytest.mark.parametrize("count", [1, 2, 5, 40, 3000])
def test_the_guard_takes_any_number_of_keys(count: int) -> None:
    """Fewer than a group are repeated, which leaves their range; many are thinned out to whole groups."""
    x, real = normal(2, 2, count, WIDTH), torch.ones(2, count, dtype=torch.bool)
    real[1, : count // 3] = False
    tried = guard.sampled(x, real, 32)
    assert tried.shape[2] % 32 == 0 and 32 <= tried.shape[2] <= guard.MOST
    for row in range(2):
        held = {tuple(token.tolist()) for token in x[row, 0][real[row]]}
        assert {tuple(token.tolist()) for token in tried[row, 0]} <= held
    if count == 40:
        assert torch.equal(tried[0], x[0, :, :32]) and torch.equal(tried[1, :, :27], x[1, :, 13:])
    learned, last = guard.split(real)
    assert torch.equal(learned | last, real) and not (learned & last).any() and last.any(-1).all()
    for scheme in (keys_of(), keys_of(subspace=Subspace.ROW), keys_of(pre_rope=True)):
        (plane,) = scheme.calibrate(normal(2, 2, 2, count, WIDTH), real, schemes.Prompt(x))
        assert torch.isfinite(plane).all() and plane.shape[1] == (2 if scheme.subspace is Subspace.ROW else 1)


def test_a_guard_that_declines_in_a_graph_gives_kivi(caplog: pytest.LogCaptureFixture) -> None:
    """Random queries teach nothing that holds for others. The report does not say that none were seen."""
    results = []
    for text in ("kivi(rotate=k)", "squat(rank=8,lam=100)"):
        module = attention()
        backend = kvcompile.backend(text, inner="eager", strict=True)
        run = compiled(module, backend)
        x = torch.randn(1, 100, module.width, generator=torch.Generator().manual_seed(5))
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="kvcompile"):
            run(x[:, :60], torch.arange(60))
            results.append(torch.cat([run(x[:, at : at + 1], torch.arange(at, at + 1)) for at in range(60, 100)]))
    plane = keys_store(module).planes[-1]
    assert not plane.any() and plane.signbit().any()
    assert torch.equal(*results) and not caplog.records and "never saw" not in str(backend.report())


def test_the_guard_decides_in_a_graph_as_by_hand() -> None:
    """On the rotated keys that the store holds, and on the call's own queries."""
    module = attention()
    run = compiled(module, kvcompile.backend("squat(rank=8)", inner="eager", strict=True))
    x = torch.randn(1, 90, 3, generator=torch.Generator().manual_seed(5)) @ torch.randn(3, module.width)
    with torch.no_grad():
        run(x, torch.arange(90))
        q, k = (part.transpose(1, 2) for part in module.project(x)[:2])
    scheme = keys_of(rank=8)
    rotation = scheme.rotation(slot())
    assert rotation is not None
    q, k = (rotate(part, rotation.order, None) for part in (q, k))
    (expected,) = scheme.calibrate(q.unflatten(1, (2, -1)), None, schemes.Prompt(k))
    assert expected.any() and torch.allclose(keys_store(module).planes[-1], expected, atol=1e-4)


def test_each_head_of_the_narrow_model_keeps_its_feedback() -> None:
    """The model by which a GPU's prefill is tested: there a head without feedback is one that learned nothing, as none is declined."""
    config = gpu_config()
    model = narrow_model(config, "cpu")
    for seed in range(3):
        torch.manual_seed(seed)
        cache = StaticCache(config=config, max_cache_len=128)
        with torch.no_grad():
            run = compiled(model, kvcompile.backend("squat(bits=4)", inner="eager", strict=True))
            run(torch.randint(0, config.vocab_size, (2, 70)), past_key_values=cache)
        for layer in cache.layers:
            (store,) = layer.keys._kv.stores.values()
            assert store.planes[-1].any(-1).any(-1).all()
