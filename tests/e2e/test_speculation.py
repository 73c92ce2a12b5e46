"""Speculative decoding by transformers' ``generate``: a draft model or the prompt proposes tokens, and the cache goes back behind those
that are refused.

What is compared is the text of the same compiled model without drafts (of the uncompiled model for ``dense``), token by token: every step
is greedy, so that drafts may change nothing. A cache that the window passed goes on dense, within what its codes stand for.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from e2e_models import llama
from transformers import DynamicCache

import kvcompile

SMALL = ("kivi(bits=4,group=16,window=16)", "squat(bits=4,group=16,window=16,subblock=8,rank=4,rotate=none)")
"""Schemes whose window is one block, which refused drafts pass."""
SCHEMES = (
    "dense", "certified", "certified(tier2=host,scratch=16,value_scratch=16)", "kivi(bits=4,group=16,window=64)", "int8(window=32)",
    "squat(bits=4,group=16,window=64,subblock=8,rank=4,rotate=none)", *SMALL, "smartkv(budget=1.0)",
)
NEW = 40


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model, and a draft model that guesses few of its tokens: the same one with other weights in its last layer."""
    torch.manual_seed(0)
    model = llama(layers=1).eval()
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.model.layers[-1].parameters():
            parameter.add_(2 * parameter.std() * torch.randn(parameter.shape))
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = 6, "constant", 0.0
    return model, draft


def written(model: Any, compiled: Any, **options: Any) -> tuple[list[int], DynamicCache]:
    """What a model continues a prompt with, its forward replaced by a compiled one, and the cache behind it."""
    prompt = torch.randint(0, model.config.vocab_size, (1, 45), generator=torch.Generator().manual_seed(1))
    prompt = torch.cat([prompt, prompt[:, :20]], 1)
    cache = DynamicCache(config=model.config)
    own = model.forward
    model.forward = compiled
    try:
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, past_key_values=cache, pad_token_id=0,
            eos_token_id=None, **options,
        )
    finally:
        model.forward = own
    return text[0].tolist(), cache


def speculation(models: tuple[Any, Any], drafts: str) -> dict[str, Any]:
    """The options of ``generate`` for a way to draft tokens."""
    return {"assistant_model": models[1]} if drafts == "assistant" else {"prompt_lookup_num_tokens": 7}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafts_change_no_token(models: tuple[Any, Any], scheme: str, drafts: str, caplog: pytest.LogCaptureFixture) -> None:
    model, options = models[0], speculation(models, drafts)
    lengths: list[int] = []
    torch._dynamo.reset()
    backend = kvcompile.backend(scheme, inner="eager")
    compiled = torch.compile(model.forward, backend=backend)

    @functools.wraps(model.forward)
    def counted(**kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return compiled(**kwargs)

    with caplog.at_level(logging.WARNING, "kvcompile"), torch._dynamo.config.patch(recompile_limit=64):
        expected, _ = written(model, model.forward if scheme == "dense" else compiled)
        found, cache = written(model, counted, **options)
    assert found == expected
    # Some drafts were taken, and others refused.
    assert len(lengths) < NEW < sum(lengths[1:])
    assert backend.report().sites and not backend.report().refusals
    passed = "ends inside a block" in caplog.text
    assert passed <= (scheme in SMALL) <= (passed or drafts == "prompt lookup")
    assert isinstance(cache.layers[0].keys, kvcompile.CompressedCache) != passed
