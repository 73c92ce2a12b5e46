"""Rotated channels, first tokens kept exact and keys without norms on CUDA: kernels against the eager definition, and whole models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_llama import gpu_config, gpu_model
from test_gpu_attend import assert_equals_eager, compiled
from test_triton_attend import Case, early_cases, normed_cases

import kvcompile
from kvcompile.lowering.ops.operations import keep_first_body, rotate_channels_body
from kvcompile.schemes.rotation import unrotate

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cases() -> list[Case]:
    """What the interpreter runs, at the head size and dtype of models."""
    found = [dataclasses.replace(case, dtype=torch.bfloat16, D=128, Dv=128, K=2) for case in (*early_cases()[1::2], *normed_cases()[::2])
             if not case.rotary and case.dtype != torch.float32]
    base = Case("int4", "int4", dtype=torch.bfloat16, D=128, Dv=128, K=2, T=5000, exact_first=16, exact_first_at=0)
    return [*found, base, dataclasses.replace(base, key="normed", value="kivi", exact_first_at=None, exact_newest=33),
            dataclasses.replace(base, S=70, B=2),
            dataclasses.replace(base, key="kivi", value="kivi", exact_first_at=None, exact_newest=100, S=70)]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_attention_over_first_tokens_and_norms(case: Case) -> None:
    assert_equals_eager(case, compiled())


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("own", [False, True])
def test_channels_are_rotated_as_on_a_cpu(tokens: int, own: bool) -> None:
    x = torch.randn(2, 8, tokens, 128, device="cuda", dtype=torch.bfloat16)
    plane = torch.randn(1, 1, 2, 128, 128, device="cuda") / 8 if own else None
    wanted = rotate_channels_body(x.cpu().double(), 64, None if plane is None else plane.cpu().double(), False)
    found = torch.compile(lambda x, plane: rotate_channels_body(x * 1.0, 64, plane, False), dynamic=tokens > 1)(x, plane)
    assert ((found.cpu().double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5).all()
    back = unrotate(found, 64, None) if plane is None else None
    assert back is None or (back - x).abs().max() < 0.05


def test_first_tokens_are_kept_as_on_a_cpu() -> None:
    x, origin = torch.randn(3, 2, 40, 64, dtype=torch.bfloat16), torch.tensor([0, 7, 39])
    planes = [torch.zeros(1, 3, 2, 9, 64, dtype=torch.bfloat16), torch.zeros(1, 3, 1, 1, 1, dtype=torch.int64)]
    moved = [plane.cuda() for plane in planes]
    run = torch.compile(keep_first_body, dynamic=True)
    for start, stop in ((0, 20), (20, 21), (21, 40)):
        pos = torch.arange(start, stop)[None]
        keep_first_body(x[:, :, start:stop], planes, pos, origin)
        run(x[:, :, start:stop].cuda(), moved, pos.cuda(), origin.cuda())
    for a, b in zip(planes, moved, strict=True):
        # Places that no token has are NaN in both.
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def config() -> transformers.LlamaConfig:
    return gpu_config()


@pytest.fixture(scope="module")
def model(config: transformers.LlamaConfig) -> torch.nn.Module:
    return gpu_model(config)


MODELS = [
    # Everything is a first token: what is left is rounding.
    ("int4(rotate=kv,sinks=512)", "static", "default", 0.04), ("int4(rotate=kv,sinks=512)", "dynamic", "default", 0.04),
    ("kivi(sinks=512,rotate=kv)", "static", "reduce-overhead", 0.04), ("normed(bits=4,turn=both,sinks=4)", "static", "default", 0.5),
    ("int8(rotate=k,sinks=4)", "static", "reduce-overhead", 0.06),
]


@pytest.mark.parametrize(("scheme", "kind", "mode", "tolerance"), MODELS)
def test_prompts_and_steps_of_a_model(
    model: torch.nn.Module, config: transformers.LlamaConfig, scheme: str, kind: str, mode: str, tolerance: float
) -> None:
    """Padded rows, a prompt in one piece and in two, a second request; later steps neither compile nor wait for the device."""
    torch._dynamo.reset()
    owner = kvcompile.backend(scheme, strict=True)
    compiled_model = torch.compile(model, backend=owner, mode=mode)
    for pieces in ((70,), (30, 40)):
        ours, theirs = (
            transformers.StaticCache(config, max_cache_len=256) if kind == "static" else transformers.DynamicCache(config=config)
            for _ in range(2)
        )
        mask = torch.ones(2, 0, dtype=torch.long, device="cuda")
        for at, count in enumerate((*pieces, *[1] * 12)):
            more = torch.ones(2, count, dtype=torch.long, device="cuda")
            if at == 0:
                more[1, :11] = 0
            mask = torch.cat([mask, more], 1)
            words = torch.randint(0, 512, (2, count), device="cuda")
            given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]}
            with torch.no_grad():
                want = model(words, past_key_values=theirs, **given).logits[:, -1].float()
                got = compiled_model(words, past_key_values=ours, **given).logits[:, -1].float().clone()
            assert ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf) < tolerance, (scheme, pieces, at)
    graphs = len(owner.graphs)
    token = torch.randint(0, 512, (2, 1), device="cuda")
    cache = transformers.StaticCache(config, max_cache_len=256) if kind == "static" else transformers.DynamicCache(config=config)
    with torch.no_grad():
        for _ in range(6):
            compiled_model(token, past_key_values=cache)
        seen = len(owner.graphs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                compiled_model(token, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # A cache that grows from nothing is a graph without tokens, one for a single token, and one for all other lengths.
    assert len(owner.graphs) == seen <= graphs + 3
    assert owner.report().allocated == owner.report().announced > 0
