"""Every view of a compressed cache crossed with every write: what the dense tensor and its views would hold, or a loud error as theirs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.runtime.handle import tensor as handle

KINDS = [(False, "int8"), (False, "kivi(bits=4)"), (True, "int8")]
"""Whether the cache grows, and its scheme."""
ROWS, HEADS, PLACES, WIDTH, TOKENS = 2, 2, 48, 32, 40
Write = Callable[[Any], Any]
View = Callable[[Any], Any]


def static(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Attention over a buffer."""
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return (q @ kc.mT).masked_fill(torch.arange(PLACES) > pos[:, None], -torch.inf).softmax(-1) @ vc


def growing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor) -> Any:
    """Attention over a cache that grows; the longer one is returned."""
    kc, vc = torch.cat((kc, k), 2), torch.cat((vc, v), 2)
    return torch.nn.functional.scaled_dot_product_attention(q, kc, vc), kc, vc


@pytest.fixture(scope="module", autouse=True)
def _once() -> Iterator[None]:
    """Graphs are compiled once a scheme."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    compiled.cache_clear()
    torch._dynamo.reset()


@functools.cache
def compiled(function: Any, scheme: str) -> Any:
    """A function compiled for a scheme."""
    return torch.compile(function, backend=kvcompile.backend(scheme, inner="eager"), dynamic=False)


class Caches:
    """A dense cache and its compressed twin. Tokens are 0 or 1, which every scheme holds closely."""

    def __init__(self, scheme: str, grown: bool) -> None:
        self.scheme, self.grown, self.end = scheme, grown, TOKENS
        self.random = torch.Generator().manual_seed(0)
        if grown:
            self.plain = [torch.zeros(ROWS, HEADS, 0, WIDTH) for _ in "kv"]
            self.own = [torch.zeros(ROWS, HEADS, 0, WIDTH) for _ in "kv"]
        else:
            self.plain = [torch.zeros(ROWS, HEADS, PLACES, WIDTH) for _ in "kv"]
            self.own = [torch.zeros(ROWS, HEADS, PLACES, WIDTH) for _ in "kv"]
        self.end = 0
        self.step(TOKENS)
        assert handle.is_handle(self.own[0])

    def step(self, count: int) -> None:
        """Take a step in both, and compare."""
        q, k, v = (torch.randn(ROWS, HEADS, count, WIDTH, generator=self.random) for _ in "qkv")
        tokens = q, (k > 0).float(), (v > 0).float()
        with torch.no_grad():
            if self.grown:
                expected, *self.plain = growing(*tokens, *self.plain)
                found, *self.own = compiled(growing, self.scheme)(*tokens, *self.own)
            else:
                pos = torch.arange(self.end, self.end + count)
                expected, found = static(*tokens, *self.plain, pos), compiled(static, self.scheme)(*tokens, *self.own, pos)
        self.end += count
        same(found, expected)


def same(found: Any, expected: Any) -> None:
    """Whether a tensor holds what its twin does, within rounding; NaN as NaN."""
    found = kvcompile.decoded(found)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), atol=0.05, rtol=0.02, equal_nan=True), (found - expected).abs().max()


VIEWS: dict[str, View] = {
    "itself": lambda c: c, "row slice": lambda c: c[0:1], "row": lambda c: c[1], "row of rows": lambda c: c[0:2][0:1],
    "part of a part": lambda c: c[1:][:, :, 3:9], "tokens": lambda c: c[:, :, 3:9], "crop": lambda c: c[:, :, :30],
    "step": lambda c: c[:, :, ::2],
    "head": lambda c: c[:, 1], "narrow": lambda c: c.narrow(2, 4, 5), "narrow rows": lambda c: c.narrow(0, 0, 1),
    "select": lambda c: c.select(2, 7), "transpose": lambda c: c.transpose(1, 2), "permute": lambda c: c.permute(2, 0, 1, 3),
    "movedim": lambda c: c.movedim(2, 0), "swapaxes": lambda c: c.swapaxes(0, 1), "mT": lambda c: c.mT, "T": lambda c: c[0, 0].T,
    "view": lambda c: c.view(-1), "reshape": lambda c: c.reshape(ROWS * HEADS, -1), "flatten": lambda c: c.flatten(0, 1),
    "unflatten": lambda c: c.unflatten(3, (2, -1)), "unsqueeze": lambda c: c.unsqueeze(0), "squeeze": lambda c: c[:, :1].squeeze(1),
    "expand": lambda c: c.unsqueeze(0).expand(1, *c.shape), "alias": lambda c: torch.ops.aten.alias(c), "detach": lambda c: c.detach(),
    "as_subclass": lambda c: c.as_subclass(torch.Tensor), "data": lambda c: c.data, "data of a row": lambda c: c[0:1].data,
    "split": lambda c: c.split(1)[1], "split tokens": lambda c: c.split(8, 2)[2], "chunk": lambda c: c.chunk(2, 2)[1],
    "tensor_split": lambda c: torch.tensor_split(c, 3, 2)[1], "hsplit": lambda c: torch.hsplit(c, 2)[0],
    "unbind": lambda c: c.unbind(2)[5],
    "iterated": lambda c: list(c)[1], "diagonal": lambda c: c.diagonal(0, 2, 3), "as_strided": lambda c: c.as_strided((3, 5), (7, 1), 2),
    "unfold": lambda c: c.unfold(2, 4, 4), "view_as": lambda c: c.view_as(c), "ravel": lambda c: torch.ravel(c),
    "atleast": lambda c: torch.atleast_3d(c), "broadcast": lambda c: torch.broadcast_tensors(c, torch.zeros(1))[0],
    "real": lambda c: c.real, "integers": lambda c: c.view(torch.int32).view(torch.float32), "same dtype": lambda c: c.float(),
    "same place": lambda c: c.to("cpu"), "contiguous": lambda c: c.contiguous(), "positive": lambda c: c.positive(), "copy": copy.copy,
    "aten.slice": lambda c: torch.ops.aten.slice.Tensor(c, 2, 1, 5), "aten.view": lambda c: torch.ops.aten.view.default(c, [-1]),
    "keyword": lambda c: torch.narrow(input=c, dim=2, start=1, length=3),
    "view of a view": lambda c: c.transpose(1, 2)[3:9].flatten(2)[:, 0],
    "indexed (a copy)": lambda c: c[torch.tensor([0])], "tokens indexed (a copy)": lambda c: c[:, :, torch.tensor([3, 5])],
    "clone (a copy)": lambda c: c.clone(), "reshaped (a copy)": lambda c: c.transpose(1, 2).reshape(-1),
    "mask (a copy)": lambda c: c[c > 0],
    "index_select (a copy)": lambda c: c.index_select(0, torch.tensor([1])), "deepcopy (a copy)": copy.deepcopy,
}


def first(t: Any) -> Any:
    """The index of the first and third place of the first dim of a tensor, as far as there are so many."""
    return torch.tensor([0, 2]) if t.shape[0] > 2 else torch.tensor([0])


def like(t: Any, *, at: Any = None) -> torch.Tensor:
    """Values of 0 and 1 of a tensor's shape, or of that many of its first dim."""
    shape = t.shape if at is None else (len(at), *t.shape[1:])
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5).float()


def assign(index: Any, value: Any) -> Write:
    """An assignment to an index."""
    return lambda t: t.__setitem__(index, value)


def augmented(name: str, value: float) -> Write:
    """An augmented assignment, by its method."""
    return lambda t: getattr(t, name)(value)


WRITES: dict[str, Write] = {
    "zero_": lambda t: t.zero_(), "fill_ 0": lambda t: t.fill_(0), "fill_ 1": lambda t: t.fill_(1.0), "mul_ 0": lambda t: t.mul_(0),
    "mul_": lambda t: t.mul_(0.5), "add_": lambda t: t.add_(1), "sub_": lambda t: t.sub_(like(t)), "div_": lambda t: t.div_(2),
    "neg_": lambda t: t.neg_(), "clamp_": lambda t: t.clamp_(0.2, 0.8), "copy_": lambda t: t.copy_(like(t)), "exp_": lambda t: t.exp_(),
    "masked_fill_": lambda t: t.masked_fill_(like(t) > 0, 1.0), "masked_scatter_": lambda t: t.masked_scatter_(like(t) > 0, like(t)),
    "index_copy_": lambda t: t.index_copy_(0, first(t), like(t, at=first(t))), "index_fill_": lambda t: t.index_fill_(0, first(t), 1.0),
    "index_add_": lambda t: t.index_add_(0, first(t), like(t, at=first(t))),
    "index_put_": lambda t: t.index_put_((first(t),), torch.tensor(1.0)),
    "index_put_ adds": lambda t: t.index_put_((first(t),), torch.tensor(1.0), True),
    "aten.index_put_ adds": lambda t: torch.ops.aten.index_put_.default(t, [first(t)], torch.tensor(1.0), True),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(t.shape, dtype=torch.long)[:1], like(t)[:1]),
    "scatter_ multiplies": lambda t: t.scatter_(0, torch.zeros(t.shape, dtype=torch.long)[:1], like(t)[:1], reduce="multiply"),
    "scatter_add_": lambda t: t.scatter_add_(0, torch.zeros(t.shape, dtype=torch.long)[:1], like(t)[:1]),
    "scatter_reduce_": lambda t: t.scatter_reduce_(0, torch.zeros(t.shape, dtype=torch.long)[:1], like(t)[:1], "amax"),
    "= all": assign(slice(None), 0), "= ellipsis": assign(Ellipsis, 1.0), "= first": assign(0, 1.0),
    "= last": assign((Ellipsis, -1), 1.0), "= 0 in a slice": assign(slice(0, 1), 0),
    "= 0 in a last slice": assign((Ellipsis, slice(0, 1)), 0),
    "= mask": lambda t: t.__setitem__(like(t) > 0, 1.0), "+=": augmented("__iadd__", 1), "*=": augmented("__imul__", 0.5),
    "*= 0": augmented("__imul__", 0), "-=": augmented("__isub__", 1), "/=": augmented("__itruediv__", 2),
    "//=": augmented("__ifloordiv__", 2),
    "%=": augmented("__imod__", 0.6), "**=": augmented("__ipow__", 2), "add out": lambda t: torch.add(like(t), 1, out=t),
    "where out": lambda t: torch.where(like(t) > 0, like(t), torch.zeros(t.shape), out=t),
    "zeros out": lambda t: torch.ops.aten.fill.Scalar_out(t, 1.0, out=t),
    "foreach zero": lambda t: torch._foreach_zero_([t]), "foreach mul": lambda t: torch._foreach_mul_([t], 0.5),
    "foreach copy": lambda t: torch._foreach_copy_([t], [like(t)]), "foreach add": lambda t: torch._foreach_add_([t, torch.zeros(2)], 1),
    "relu": lambda t: torch.nn.functional.relu(t, inplace=True), "aten.zero_": lambda t: torch.ops.aten.zero_.default(t),
    "init zeros": lambda t: torch.nn.init.zeros_(t), "init constant": lambda t: torch.nn.init.constant_(t, 1.0),
    "init ones": lambda t: torch.nn.init.ones_(t), "keyword": lambda t: torch.zero_(input=t), "lerp_": lambda t: t.lerp_(like(t), 0.5),
    "addcmul_": lambda t: t.addcmul_(like(t), like(t)), "fmod_": lambda t: t.fmod_(0.7), "nan": lambda t: t.fill_(float("nan")),
    "normal_": lambda t: t.normal_(generator=torch.Generator().manual_seed(3)),
    "uniform_": lambda t: t.uniform_(generator=torch.Generator().manual_seed(3)),
    "random_": lambda t: t.random_(0, 2, generator=torch.Generator().manual_seed(3)),
    "exponential_": lambda t: t.exponential_(generator=torch.Generator().manual_seed(3)),
    "bernoulli_": lambda t: t.bernoulli_(0.5, generator=torch.Generator().manual_seed(3)), "apply_": lambda t: t.apply_(lambda x: x + 1),
    "real": lambda t: setattr(t, "real", like(t)), "from itself": lambda t: t.copy_(t.flip(0)), "by itself": lambda t: t.add_(t),
}
"""Writes that change values in place."""


def crossed(caches: Caches, view: View, write: Write, watched: View) -> None:
    """Write through a view of both twins; the whole, the view and another view hold the dense values then, and after a step."""
    twins = caches.plain[0], caches.own[0]
    others = [watched(each) for each in twins]
    views = [view(each) for each in twins]
    failed = []
    for each in views:
        try:
            write(each)
            failed.append(None)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            failed.append(repr(error))
    assert (failed[0] is None) == (failed[1] is None), failed
    if failed[0] is not None:
        return
    for one, two in (twins, others, views):
        same(two, one)
        same(two + 0 if two.is_floating_point() else two, one)
    with torch.no_grad():
        for each in twins:
            each[:, :, 2].fill_(1.0)
    for one, two in (twins, others, views):
        same(two, one)
    if bool(torch.isfinite(twins[0]).all()):
        caches.step(1)
        if not caches.grown:
            for one, two in (others, views):
                same(two, one)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("grown", "scheme"), KINDS)
def test_every_view(grown: bool, scheme: str, view: str) -> None:
    """Each view crossed with the writes that take ways of their own: a shortcut, codes, the dense tensor."""
    for write in ("zero_", "fill_ 1", "mul_", "copy_", "foreach zero"):
        crossed(Caches(scheme, grown), VIEWS[view], WRITES[write], lambda c: c[0:1])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("grown", "scheme"), KINDS)
def test_every_write(grown: bool, scheme: str, write: str) -> None:
    """Each write crossed with the kinds of views: the cache itself, a part in codes, decoded values, a turned view, a copy."""
    for view in ("itself", "row slice", "tokens", "transpose", "tokens indexed (a copy)"):
        crossed(Caches(scheme, grown), VIEWS[view], WRITES[write], lambda c: c[:, :, 1:7])


@pytest.mark.parametrize(("grown", "scheme"), KINDS)
def test_parts_follow_compiled_calls(grown: bool, scheme: str) -> None:
    """A part or view that is held while the whole is stepped shows the new tokens, where the dense one would."""
    caches = Caches(scheme, grown)
    held = [[view(each[0]) for view in (lambda c: c[0:1], lambda c: c[:, :, 30:], lambda c: c.mT)] for each in (caches.plain, caches.own)]
    for count in (1, 1, 1):
        caches.step(count)
        for one, two in zip(*held, strict=True):
            same(two + 0, one)


@pytest.mark.parametrize("scheme", ["int8", "kivi(bits=4)"])
def test_compiled_calls_write_through_parts(scheme: str) -> None:
    """A compiled call that is given the rows of a cache writes to that cache."""
    caches = Caches(scheme, False)
    q, k, v = (torch.randn(1, HEADS, 1, WIDTH, generator=caches.random) for _ in "qkv")
    pos = torch.tensor([caches.end])
    with torch.no_grad():
        parts = [[each[0:1] for each in twin] for twin in (caches.plain, caches.own)]
        expected, found = static(q, k, v, *parts[0], pos), compiled(static, scheme)(q, k, v, *parts[1], pos)
    same(found, expected)
    for one, two in zip(caches.plain, caches.own, strict=True):
        same(two, one)
    caches.step(1)


def test_a_write_that_no_name_tells_is_kept() -> None:
    """An operation that writes to its operand under a name of its own is seen by the operand's version."""
    def nudge(t: Any) -> Any:
        if torch.overrides.has_torch_function_unary(t):
            return torch.overrides.handle_torch_function(nudge, (t,), t)
        t[0, 0] += 1
        return t.mean()

    caches = Caches("int8", False)
    for view in (lambda c: c, lambda c: c[0:1], lambda c: c[1, :, 2:4]):
        assert torch.allclose(nudge(view(caches.plain[0])), nudge(view(caches.own[0])), atol=0.05)
        same(caches.own[0], caches.plain[0])
        caches.step(1)
