"""Events: what a caller does to a cache or to a module's counter between two calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
_KEPT = frozenset({"ring", "cross", "concatenated"})
Act = Callable[[Any], None]
"""Takes the ``script.Run``."""


@dataclass(frozen=True)
class Event:
    """What is done; the layouts where it means nothing, and whether the caches must be the module's own buffers."""

    act: Act
    without: frozenset[str] = frozenset()
    buffers: bool = False

    def needs(self, every: Mapping[str, frozenset[str]]) -> Iterator[tuple[str, frozenset[str]]]:
        """Give the features that this event constrains, each with the values that it allows."""
        if self.without:
            yield "layout", every["layout"] - self.without
        if self.buffers:
            yield "caches", frozenset({"buffers"})


def _rows(write: Callable[[Tensor], object]) -> Event:
    """An event that writes to each cache tensor, batch first."""

    def act(run: Any) -> None:
        for cache in run.batch_first():
            write(cache)

    return Event(act, frozenset({"paged"}))


def _tokens(write: Callable[[Tensor], object]) -> Event:
    """An event that writes to each cache as [B, K, T, D]."""

    def act(run: Any) -> None:
        for cache in run.held():
            write(cache)

    return Event(act, frozenset({"paged"}))


def _back(count: int) -> Event:
    return Event(lambda run: run.move(max(0, run.start - count)), frozenset({"ring", "cross"}))


def _ahead(count: int) -> Event:
    return Event(lambda run: run.move(run.start + max(0, min(count, run.room - run.start - 8))), _KEPT)


def _second_request(run: Any) -> None:
    for cache in run.tensors():
        cache.zero_()
    run.forget()


def _deepcopied(run: Any) -> None:
    run.replace(copy.deepcopy(run.module))


def _reloaded(run: Any) -> None:
    run.module.load_state_dict(copy.deepcopy(run.module.state_dict()))


def _earlier(run: Any) -> None:
    state, start = run.snapshot
    run.module.load_state_dict(copy.deepcopy(state))
    run.move(start)


def _swapped(run: Any) -> None:
    module = run.module
    module.k_cache, module.v_cache = module.v_cache, module.k_cache


def _read(run: Any) -> None:
    for cache in run.tensors():
        run.more.append(cache.clone().sum()[None] * 0)


def _assign(cache: Tensor) -> None:
    cache[0:1] = 0


def _index(cache: Tensor) -> None:
    cache[torch.tensor([0], device=cache.device)] = 0.0


def _reorder(cache: Tensor) -> None:
    cache.copy_(cache.flip(0).clone())


_APART = frozenset({"one-tensor", "halves", "layers", "keys-are-values", "concatenated", "cross", "keys-transposed"})

EVENTS: Mapping[str, Event] = {
    "nothing": Event(lambda run: None),
    "row-zero": _rows(lambda c: c[0:1].zero_()),
    "row-fill": _rows(lambda c: c[0:1].fill_(1.0)),
    "row-fill-zero": _rows(lambda c: c[:1].fill_(0)),
    "row-mul-zero": _rows(lambda c: c[:1].mul_(0)),
    "row-mul": _rows(lambda c: c[0:1].mul_(-1.0)),
    "row-negated": _rows(lambda c: c[1:2].neg_()),
    "row-copied": _rows(lambda c: c[:1].copy_(c[1:2].clone())),
    "row-assigned": _rows(_assign),
    "row-selected": _rows(lambda c: c[0].zero_()),
    "row-indexed": _rows(_index),
    "row-narrowed": _rows(lambda c: c.narrow(0, 1, 1).zero_()),
    "row-chunked": _rows(lambda c: c.split(1)[0].zero_()),
    "row-filled-by-index": _rows(lambda c: c.index_fill_(0, torch.tensor([0], device=c.device), 1.0)),
    "alias-zero": _rows(lambda c: torch.ops.aten.alias(c).zero_()),
    "subclass-zero": _rows(lambda c: c.as_subclass(torch.Tensor).zero_()),
    "detached-zero": _rows(lambda c: c.detach().zero_()),
    "viewed-zero": _rows(lambda c: c.view(c.shape).zero_()),
    "transposed-zero": _rows(lambda c: c.transpose(0, 1)[:, 0:1].zero_()),
    "all-zero": _rows(lambda c: c.zero_()),
    "all-negated": _rows(lambda c: c.mul_(-1.0)),
    "reordered": _rows(_reorder),
    "tokens-zero": _tokens(lambda c: c[:, :, 1:3].zero_()),
    "tokens-mul": _tokens(lambda c: c[:, :, :2].mul_(-1.0)),
    "head-zero": _tokens(lambda c: c[:, 0:1].zero_()),
    "read": Event(_read),
    "swapped": Event(_swapped, _APART, buffers=True),
    "deepcopied": Event(_deepcopied, buffers=True),
    "reloaded": Event(_reloaded, buffers=True),
    "earlier-state": Event(_earlier, _KEPT, buffers=True),
    "back-one": _back(1),
    "back-three": _back(3),
    "back-blocks": _back(18),
    "back-to-zero": _back(1000),
    "ahead-one": _ahead(1),
    "ahead-five": _ahead(5),
    "ahead-thirty": _ahead(30),
    "second-request": Event(_second_request, frozenset({"cross"})),
    "eager-step": Event(lambda run: run.step(1, eager=True)),
}
"""By name, the plain one first."""
