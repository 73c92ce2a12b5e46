"""kivi's large groups: 64 tokens of keys and 128 channels of values share a scale, in compiled models and every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama

import kvcompile
from kvcompile.errors import BadOption, HeadDimNotDivisible
from kvcompile.report import short_scheme
from kvcompile.schemes import parse
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

LARGE = "k=kivi(bits=4,group=64),v=kivi(bits=4,group=128)"


def slot(head_dim: int = 128, role: Role = Role.KEY) -> SlotSpec:
    return SlotSpec(2, head_dim, torch.bfloat16, role)


@pytest.mark.parametrize(("text", "window"), [
    ("kivi", 32), ("kivi(group=8)", 32), ("kivi(group=64)", 64), ("kivi(group=128)", 128), ("kivi(group=64,window=192)", 192),
    ("squat(group=64)", 64), ("normed(group=64)", 64),
])
def test_the_window_comes_with_the_group(text: str, window: int) -> None:
    made = parse(text)
    assert made.window == window == made.for_role(Role.VALUE).window
    assert short_scheme(made) == text and parse(made.spec()) == made


@pytest.mark.parametrize(("text", "bits"), [("kivi(group=64)", 2.5), ("kivi(bits=4,group=64)", 4.5), ("kivi(axis=token,group=128)", 2.25)])
def test_bits_stored(text: str, bits: float) -> None:
    assert parse(text).for_role(Role.KEY).bits_per_value(slot()) == bits
    assert parse("kivi(group=128)").for_role(Role.VALUE).bits_per_value(slot(role=Role.VALUE)) == 2.25


@pytest.mark.parametrize("role", Role)
def test_one_scale_spans_the_group(role: Role) -> None:
    """A loud value coarsens the channels or tokens of its group and no others."""
    made, spec = parse(f"kivi(bits=4,group={64 if role is Role.KEY else 128})").for_role(role), slot(256, role)
    x = torch.rand(1, 2, 128, 256, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[0, 0, 3, 5] = 1000.0
    changed = made.decode(made.encode(loud), spec) != made.decode(made.encode(x), spec)
    group = (0, 0, slice(0, 64), 5) if role is Role.KEY else (0, 0, 3, slice(0, 128))
    assert changed[group].float().mean() > 0.9
    changed[group] = False
    assert not changed.any()


@pytest.mark.parametrize("text", ["kivi(group=128)", "squat(group=128)", "kivi(group=128,axis=channel)"])
def test_keys_of_a_group_longer_than_a_page_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match=r"at most 64 tokens for keys.*found 128; values take 128 channels a scale: 'k=\w+\(group=64\),v="):
        parse(text).for_role(Role.KEY).check(slot())
    model = torch.compile(llama(layers=1, head_dim=128), backend=kvcompile.backend(text, inner="eager", strict=True))
    with pytest.raises(Exception, match="at most 64 tokens for keys"), torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long), past_key_values=cache_of(llama(layers=1, head_dim=128), "static"))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(HeadDimNotDivisible, match="found head dim 64"):
        parse("kivi(group=128)").for_role(Role.VALUE).check(slot(64, Role.VALUE))
    for text in ("kivi(group=256)", "kivi(group=96)", "kivi(group=64,window=32)"):
        with pytest.raises(BadOption, match="kivi"):
            parse(text)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_two_requests_of_a_model_through_inductor(kind: str) -> None:
    """Prompts and steps across the end of a block whose tokens have left the window, beside the same codes under an eager graph."""
    runs = {}
    for inner in ("inductor", "eager", None):
        torch.compiler.reset()
        model: Any = llama(layers=1, head_dim=128)
        call = model if inner is None else torch.compile(model, backend=kvcompile.backend(LARGE, inner=inner, strict=True))
        found = []
        for _ in range(2):
            cache = cache_of(model, kind, 256)
            for count in (190, 1, 1, 3, 1):
                words = torch.randint(0, 64, (2, count), generator=torch.Generator().manual_seed(count))
                with torch.no_grad():
                    found.append(call(words, past_key_values=cache).logits[:, -1])
        runs[inner] = torch.stack(found)
    torch.testing.assert_close(runs["inductor"], runs["eager"], rtol=0, atol=1e-4)
    error = (runs["inductor"] - runs[None]).norm(dim=-1) / runs[None].norm(dim=-1)
    # The prompt itself is attended to exactly; its codes are read by the steps.
    assert error.max() <= 0.1 and error[1:5].min() > 1e-5 and error[6:].min() > 1e-5
