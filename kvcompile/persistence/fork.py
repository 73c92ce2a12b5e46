"""Fork: several conversations from one prefix, which share the prefix's codes until one of them goes on."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

from kvcompile.errors import CacheUnfit
from kvcompile.runtime.handle.operations import ForkMemo

Cache = TypeVar("Cache")


def fork(cache: Cache) -> Cache:
    """Return a cache with the same tokens that goes on by itself; compressed tensors share memory until one of the two is written.

    ``cache``: a cache of transformers, or tuples, lists and dicts of tensors. The first call that appends to one of the two copies codes
    for itself; the last one that holds them writes in place. Dense tensors are copied at once. Raises CacheUnfit for a module.
    """
    if isinstance(cache, torch.nn.Module):
        raise CacheUnfit(
            expected="a cache", found=f"a module ({type(cache).__name__}), whose weights would be copied too",
            todo="fork its buffers, kvcompile.fork([module.k, module.v]), and set them before each call",
        )
    return copy.deepcopy(cache, ForkMemo())
