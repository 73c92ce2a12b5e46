"""Caches that one call fills and later calls only read: the keys and values of what is attended across to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import Attention, visible
from torch.nn import functional as F

import kvcompile
from kvcompile.backend import Backend
from kvcompile.runtime.handle.tensor import is_handle

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")

SOURCE, CAPACITY = 11, 32


class Memory:
    """What a decoder keeps between calls: a self-attention buffer it goes on writing, and the projected source."""

    def __init__(self, module: Attention) -> None:
        self.keys = torch.zeros(module.batch, module.kv, CAPACITY, module.dim)
        self.values = torch.zeros(module.batch, module.kv, CAPACITY, module.dim)
        self.across: list[torch.Tensor] | None = None


class Decoder(Attention):
    """Self-attention over a buffer, then attention across to a source that is projected once."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, memory: Memory, source: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (item.transpose(1, 2) for item in self.project(x))
        memory.keys.index_copy_(2, pos, k)
        memory.values.index_copy_(2, pos, v)
        y = self.close(F.scaled_dot_product_attention(q, memory.keys, memory.values, attn_mask=visible(pos, CAPACITY)))
        if memory.across is None:
            _, k, v = (item.transpose(1, 2) for item in self.project(source))
            empty = torch.zeros(self.batch, self.kv, 0, self.dim)
            memory.across = [torch.cat([empty, k], 2), torch.cat([empty, v], 2)]
        keys, values = memory.across
        return y + self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


def drive(
    module: Decoder, call: Callable[..., torch.Tensor], mask: torch.Tensor | None, first: Any = None
) -> tuple[list[torch.Tensor], Memory]:
    generator = torch.Generator().manual_seed(3)
    source = torch.randn(module.batch, SOURCE, module.width, generator=generator)
    memory, found, start = Memory(module), [], 0
    with torch.no_grad():
        for index, count in enumerate((5, 1, 1, 1, 3, 1)):
            x = torch.randn(module.batch, count, module.width, generator=generator)
            run = first if first is not None and index == 0 else call
            found.append(run(x, torch.arange(start, start + count), memory, source, mask))
            start += count
    return found, memory


def tried(
    scheme: str, mask: torch.Tensor | None, eager_first: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], Memory, Backend]:
    torch.manual_seed(0)
    module = Decoder().eval()
    wanted, _ = drive(module, module, mask)
    owner = kvcompile.backend(scheme, inner="eager")
    found, memory = drive(module, torch.compile(module, backend=owner), mask, module if eager_first else None)
    return wanted, found, memory, owner


@pytest.mark.parametrize("mask", [None, torch.arange(SOURCE)[None] < 8], ids=["whole", "masked"])
def test_what_is_attended_across_to_is_stored_once_and_read(mask: torch.Tensor | None) -> None:
    wanted, found, memory, owner = tried("dense", mask)
    for expected, value in zip(wanted, found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert all(len(graph.sites) == 2 and not graph.refusals for graph in owner.graphs)
    assert memory.across is not None and all(is_handle(item) and item.shape[2] == SOURCE for item in memory.across)
    assert any(site.cache == "filled before" for site in owner.graphs[-1].sites)


def test_compressed_it_is_not_the_same_but_near() -> None:
    wanted, found, memory, _ = tried("int8", None)
    errors = [float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)]
    assert errors[0] <= 1e-6 < max(errors[1:]) <= 2e-2
    held = memory.across[0]  # type: ignore[index]
    first = kvcompile.decoded(held).clone()
    again = kvcompile.decoded(held)
    assert torch.equal(first, again)


def test_steps_compile_no_more_than_stock() -> None:
    graphs: list[int] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(1)
        return module.forward

    torch.manual_seed(0)
    module = Decoder().eval()
    drive(module, torch.compile(module, backend=keep), None)
    torch._dynamo.reset()
    *_, owner = tried("dense", None)
    assert len(owner.graphs) <= len(graphs) + 1


def test_what_an_uncompiled_call_filled_is_left_alone() -> None:
    wanted, found, memory, owner = tried("dense", None, eager_first=True)
    for expected, value in zip(wanted, found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    reasons = {refusal.reason for refusal in owner.report().refusals}
    assert len(reasons) == 1 and "no compiled call has filled it" in reasons.pop()
    assert memory.across is not None and not any(is_handle(item) for item in memory.across)
    assert all(len(graph.sites) == 1 for graph in owner.graphs), "self-attention is rewritten all the same"


class Projected(Attention):
    """The source is projected by one compiled call, whose results the caller passes to each step."""

    def encode(self, source: torch.Tensor, fused: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v = (item.transpose(1, 2) for item in self.project(source))
        return torch.stack((k, v)).unbind() if fused else (k, v)

    def forward(self, x: torch.Tensor, cross: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.close(F.scaled_dot_product_attention(q, *cross))


def requested(
    module: Projected, encode: Callable[..., Any], step: Callable[..., torch.Tensor], count: int, seed: int
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Some steps over a source that is projected once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        cross = encode(torch.randn(module.batch, SOURCE + seed, module.width, generator=generator))
        return [step(torch.randn(module.batch, new, module.width, generator=generator), cross) for new in (5, *[1] * count)], cross


@pytest.mark.parametrize(("scheme", "allowed"), [("dense", 1e-6), ("int8", 2e-2)])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.compile)])
def test_what_a_compiled_call_returned_is_stored_by_the_first_step_that_reads_it(scheme: str, allowed: float, inner: str) -> None:
    torch.manual_seed(0)
    module = Projected().eval()
    owner = kvcompile.backend(scheme, inner=inner, strict=True)
    encode, step = torch.compile(module.encode, backend=owner), torch.compile(module, backend=owner)
    for seed in (0, 1, 2):
        wanted, _ = requested(module, module.encode, module, 4, seed)
        found, cross = requested(module, encode, step, 4, seed)
        errors = [float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)]
        assert (scheme == "int8") * 1e-6 <= max(errors) <= allowed
        assert all(is_handle(item) for item in cross)
    # Each request is one projection and as many steps: those that came later compile nothing for their own caches.
    assert len(owner.graphs) <= 7, [str(graph) for graph in owner.graphs]


def test_tensors_that_share_memory_stay_dense_and_right() -> None:
    torch.manual_seed(0)
    module, owner = Projected().eval(), kvcompile.backend("int8", inner="eager")
    encode = torch.compile(lambda source: module.encode(source, fused=True), backend=owner)
    wanted, _ = requested(module, module.encode, module, 3, 0)
    found, cross = requested(module, encode, torch.compile(module, backend=owner), 3, 0)
    torch.testing.assert_close(found, wanted)
    assert not any(is_handle(item) for item in cross)


def test_an_input_that_is_handed_back_is_no_cache() -> None:
    """Its caller made it, and may make it anew in every step."""
    torch.manual_seed(0)
    module, owner = Projected().eval(), kvcompile.backend("int8", inner="eager")
    hand_on = torch.compile(lambda *given: (given[0].transpose(0, 1).transpose(0, 1), given[1] + 0), backend=owner)
    wanted, _ = requested(module, module.encode, module, 3, 0)
    found, cross = requested(module, lambda source: hand_on(*module.encode(source)), torch.compile(module, backend=owner), 3, 0)
    torch.testing.assert_close(found, wanted)
    assert not any(is_handle(item) for item in cross) and "no compiled call has filled it" in str(owner.report().refusals)
