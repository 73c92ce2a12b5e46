"""Fork: copies of a cache for several conversations with one prefix; the copies share the prefix's codes until one of them is written."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

from kvcompile.errors import CacheUnfit
from kvcompile.runtime.handle.operations import ForkMemo

Cache = TypeVar("Cache")


def fork(cache: Cache) -> Cache:
    """Return a copy of a cache that can be continued independently; compressed tensors share memory until the cache or its copy is written.

    ``cache``: a cache of transformers, or tuples, lists and dicts of tensors. The first call that appends to the cache or to its copy
    copies the codes; the last cache that holds shared codes writes them in place. Dense tensors are copied at once. Raises CacheUnfit for a
    module.
    """
    if isinstance(cache, torch.nn.Module):
        raise CacheUnfit(
            expected="a cache", found=f"a module ({type(cache).__name__}), whose weights would be copied too",
            todo="fork its buffers, kvcompile.fork([module.k, module.v]), and set them before each call",
        )
    return copy.deepcopy(cache, ForkMemo())
