"""Store: compressed tokens in memory, the state of each cache, and the set of live caches."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Pickles of version 0.1 name this module, which was a file then (``files.pickled``).
    if name == "StoreSpec":
        from kvcompile.runtime.store.store import StoreSpec

        return StoreSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
