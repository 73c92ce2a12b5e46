"""Control: measures how far an uncompiled model's logits move when its keys and values are rounded as a scheme rounds them.

A model with random weights may amplify any rounding (a router may choose another expert), so a large error under a scheme proves a wrong
rewrite only if the model itself tolerates the same rounding.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch

from kvcompile.schemes import Scheme
from kvcompile.types import Role, SlotSpec


def _round_trip(scheme: Scheme, x_BKSD: torch.Tensor, role: Role) -> torch.Tensor:
    spec, half = SlotSpec(x_BKSD.shape[1], x_BKSD.shape[3], x_BKSD.dtype, role), scheme.for_role(role)
    return half.decode(half.encode(x_BKSD), spec).to(x_BKSD.dtype)


@contextlib.contextmanager
def rounded(scheme: Scheme) -> Iterator[None]:
    """Within the context, make transformers' caches store keys and values [B, K, S, D] as a token-wise scheme decodes them."""
    from transformers import Cache

    plain = Cache.update

    def update(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key, value = (_round_trip(scheme, x, role) for x, role in zip((key_states, value_states), Role, strict=True))
        return plain(self, key, value, layer_idx, *args, **kwargs)

    with unittest.mock.patch.object(Cache, "update", update):
        yield
