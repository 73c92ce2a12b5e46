"""Generation with a cache whose keys and values went through ``encode`` and ``decode``: what an engine over codes must give."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvcompile.schemes.pairs import parse_pair
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.types import Role, SlotSpec


def stored(scheme: Any, slot: SlotSpec, x: torch.Tensor) -> torch.Tensor:
    """What a pool gives back of tokens [B, K, S, D]."""
    rotation = scheme.rotation(slot)
    x = x if rotation is None else rotate(x, rotation.order, None)
    x = scheme.decode(tuple(scheme.encode(x)), slot).to(x.dtype)
    return x if rotation is None else unrotate(x, rotation.order, None)


def emulated(model: Any, text: str, prompts: list[list[int]], new: int) -> list[tuple[list[int], list[float]]]:
    """The tokens of each prompt alone, and the logarithm of the probability of each; ``text``: as KVCOMPILE_SCHEME has it."""
    schemes = parse_pair(text)

    class Coded(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *given: Any, **named: Any) -> Any:
            coded = [
                stored(scheme, SlotSpec(x.shape[1], x.shape[3], x.dtype, role), x)
                for scheme, x, role in zip(schemes, (key_states, value_states), (Role.KEY, Role.VALUE), strict=True)
            ]
            return super().update(*coded, *given, **named)

    found = []
    for prompt in prompts:
        cache, ids, tokens, logs = Coded(config=model.config), torch.tensor([prompt]), [], []
        with torch.no_grad():
            for _ in range(new):
                step = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].log_softmax(-1)
                ids = step.argmax(-1, keepdim=True)
                tokens.append(int(ids))
                logs.append(float(step.amax()))
        found.append((tokens, logs))
    return found
