"""Store: compressed tokens in memory, what a cache knows of them, and the caches that live."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Pickles of version 0.1 name this module, which was a file (``files.pickled``).
    if name == "StoreSpec":
        from kvcompile.runtime.store.store import StoreSpec

        return StoreSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
