"""Requests of a small model over schemes with constant planes."""

from __future__ import annotations

from typing import Any

import torch
from e2e_layers import llama
from transformers import DynamicCache, StaticCache

import kvcompile


def stores_after_two_requests(policy: object, kind: str, error: float, name: str) -> list[Any]:
    """Check prompts and steps of two requests beside the uncompiled model; return the stores with the scheme ``name``, at least one.

    ``kind``: static or dynamic caches. ``error``: the largest difference of logits that is allowed, of their norm.
    """
    owner, model = kvcompile.backend(policy, inner="eager", strict=True), llama(layers=1)
    compiled, plain = torch.compile(model, backend=owner), llama(layers=1)
    for _ in range(2):
        caches = [
            DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=128)
            for _ in range(2)
        ]
        for count in (70, 1, 3, 1):
            words = torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(count))
            with torch.no_grad():
                found, wanted = (run(words, past_key_values=cache).logits for run, cache in zip((compiled, plain), caches, strict=True))
            assert (found - wanted).norm() <= error * wanted.norm()
    stores = [store for state in owner.memory.live for store in state.stores.values() if store.spec.scheme.name == name]
    assert stores
    return stores
