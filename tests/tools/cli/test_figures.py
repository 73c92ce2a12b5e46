"""Published byte figures, computed from our layouts: the Llama-2-70B shape of the source of int8 and int4.

80 layers, 8 kv heads, head dim 128: 2 x 80 x 8 x 128 values a token.
"""

from __future__ import annotations

import pytest
import torch

from kvcompile.schemes import parse
from kvcompile.types import Role, SlotSpec

LAYERS = 80
SLOT = SlotSpec(heads=8, head_dim=128, dtype=torch.float16, role=Role.KEY)
CONTEXT = 4096
BUDGET = (80 - 35) * 10**9
"""What an 80 GB card has left beside 35 GB of weights."""


def per_token(keys: str, values: str | None = None) -> float:
    """Bytes of one token of one request, all layers, keys and values, scales included."""
    return LAYERS * sum(parse(text).layout(SLOT).bytes_per_token(SLOT.heads) for text in (keys, values or keys))


def test_full_precision() -> None:
    assert per_token("dense") == 2 * 80 * 8 * 128 * 2 == 327_680


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_eight_bits_and_one_scale_per_token_and_head(name: str) -> None:
    assert per_token(name) == 163_840 + 2_560
    assert 2_560 / 163_840 == pytest.approx(0.016, abs=0.0005)


def test_four_bits_in_groups_of_32() -> None:
    codes, scales = 327_680 / 4, 2 * 80 * 8 * (128 // 32) * 2
    assert per_token("int4") == codes + scales
    assert per_token("dense") / per_token("int4") == pytest.approx(3.5, abs=0.06)
    assert parse("int4").bits_per_value(SLOT) == 4.5


def test_four_bits_and_one_scale_per_token() -> None:
    assert per_token("int4(granularity=token)") == 327_680 / 4 + 2_560


def test_mixed_keys_and_values() -> None:
    assert per_token("fp8", "int4") == (per_token("fp8") + per_token("int4")) / 2


def test_requests_beside_the_weights() -> None:
    requests = {name: int(BUDGET // (per_token(name) * CONTEXT)) for name in ("dense", "int8", "int4")}
    # The source's table (32, 64, 120) leaves scales out and room free. Codes alone would fit 33, 67 and 134 requests:
    # the scales cost one at 8 bits and 15 at 4.
    assert requests == {"dense": 33, "int8": 66, "int4": 119}


def test_batch_of_64_at_4096_tokens() -> None:
    assert per_token("dense") * 64 * CONTEXT == pytest.approx(85.9e9, rel=0.001)
