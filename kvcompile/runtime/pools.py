"""Pools at run time: caches that are read through a gather, of which any place may be written in any order.

Nothing on the host says which places hold tokens, so a pool's store holds all of them from its first call on, and
its length is its capacity.
"""

from __future__ import annotations

import torch

from kvcompile.errors import Unsupported
from kvcompile.runtime.groups import Group
from kvcompile.runtime.state import CacheState, bring
from kvcompile.runtime.store import ADOPT_TOKENS
from kvcompile.types import pages_for


def check(group: Group, state: CacheState) -> None:
    """Raise where a cache that was filled as rows of tokens is now read through a gather, or the other way round."""
    held = next(iter(state.axes.values()))
    wanted = group.first.plan.slot.axes
    if held.pool == wanted.pool and (not held.pool or held.labels == wanted.labels):
        return
    raise Unsupported(
        expected="a cache that every compiled call reads in one way, as it lies or through a gather", found="both", where=group.where,
        todo="read it through the gather in every call, or give this call a cache of its own",
    )


def adopt(group: Group, tensor: torch.Tensor, state: CacheState) -> None:
    """Encode a dense pool, all of its places, a few blocks at a time: no second dense copy of it is made."""
    for item in group.bindings:
        axes, spec, store = item.plan.slot.axes, item.plan.spec, state.stores[item.part]
        capacity, outer = axes.room(tensor.shape), axes.token_dim
        store.reserve(pages_for(capacity))
        places = capacity // max(tensor.shape[outer], 1)
        step = max(1, ADOPT_TOKENS // places)
        for start in range(0, tensor.shape[outer], step):
            part = tensor.narrow(outer, start, min(step, tensor.shape[outer] - start))
            store.adopt(bring(part, axes, spec.heads, spec.head_dim), first=start * places)
        state.length = state.top = state.behind = capacity
