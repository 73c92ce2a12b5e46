"""Left padding under schemes whose tokens share scales: a padded row holds what it would hold alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama
from registry import VARIANTS
from transformers import LlamaForCausalLM

import kvcompile
from kvcompile.lowering.ops.operations import append_body, decodable
from kvcompile.schemes import Scheme
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

SHARING = tuple({type(scheme): scheme for scheme in reversed(VARIANTS) if scheme.keeps_padding_out and not scheme.window}.values())
"""Schemes without a window whose tokens set each other's scales."""

SLOT = SlotSpec(1, 32, torch.float32, Role.KEY)

CASES = [(SHARING[0], kind, eager) for kind in ("static", "dynamic") for eager in (False, True)] + [
    (scheme, "static", False) for scheme in SHARING[1:]
]


def loud_padding(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with a padding word that makes keys and values far larger than those of other words."""
    with torch.no_grad():
        for layer in model.model.layers:
            # A direction that only the padding word has: the norm before the projections keeps a word's size from mattering.
            layer.self_attn.k_proj.weight[:, 0] *= 100
            layer.self_attn.v_proj.weight[:, 0] *= 100
        model.model.embed_tokens.weight[:, 0] = 1e-3
        model.model.embed_tokens.weight[0] = torch.nn.functional.one_hot(torch.tensor(0), model.config.hidden_size)
    return model


def logits(model: LlamaForCausalLM, compiled: Any, kind: str, ids: torch.Tensor, mask: torch.Tensor, eager_prompt: bool) -> torch.Tensor:
    """Logits [4, B, vocabulary] of four steps after a prompt."""
    cache, found = cache_of(model, kind), []
    with torch.no_grad():
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        for step in range(5):
            call = model if eager_prompt and not step else compiled
            out = call(input_ids=ids, past_key_values=cache, attention_mask=mask, position_ids=position)
            found.append(out.logits[:, -1])
            ids, mask = torch.full_like(ids[:, :1], 3 + step), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            position = position[:, -1:] + 1
    return torch.stack(found[1:])


@pytest.mark.parametrize(("scheme", "kind", "eager_prompt"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_padding_sets_no_scale(scheme: Scheme, kind: str, eager_prompt: bool) -> None:
    model = loud_padding(llama(layers=1))
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    ids[1, :5] = 0
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    together = logits(model, compiled, kind, ids, mask, eager_prompt)
    for row, first in ((0, 0), (1, 5)):
        alone = logits(model, compiled, kind, ids[row : row + 1, first:], mask[row : row + 1, first:], eager_prompt)
        assert (together[:, row] - alone[:, 0]).abs().max() < 1e-5 * alone.abs().max()


def test_what_lies_before_the_origin_is_kept_as_well() -> None:
    """A mask that shows padding later finds what was written there."""
    for scheme in SHARING:
        planes = [scheme.empty(spec, SLOT, 1, 2) for spec in scheme.layout(SLOT).planes]
        x = torch.randn(2, 1, 6, SLOT.head_dim)
        x[1, :, :4] *= 1e3
        append_body(x, planes, torch.arange(6)[None], scheme.spec(), torch.tensor([0, 4]))
        found = scheme.decode(decodable(scheme, planes, SLOT, slice(None)), SLOT)[:, :, :6]
        size = torch.tensor([[1.0] * 6, [1e3] * 4 + [1.0] * 2])[:, None, :, None]
        assert ((found - x).abs() < 0.5 * size).all()
