"""Persistent keys: names of checks that passed, as files in Inductor's cache folder, so that a new process need not repeat the checks.

A key is valid for the package sources and the torch version that it was stored with. Nothing is stored if Inductor's caches are off
(``force_disable_caches``, or ``fx_graph_cache`` off).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kvcompile.lowering.cache_key import SALTED, sources_hash
from kvcompile.lowering.host.inductor_entry import cache_dir, config

SOURCES = (*SALTED, "runtime", "validation")


class PersistentKeys:
    """A set of keys that outlasts the process; ``kind`` is the name of the set."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __contains__(self, key: str) -> bool:
        return _kept() and self._file(key).exists()

    def add(self, key: str) -> None:
        """Store a key; a folder that cannot be written is ignored, and the key is lost."""
        if not _kept():
            return
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError:
            return

    def _file(self, key: str) -> Path:
        name = hashlib.sha256(f"{sources_hash(names=SOURCES)}:{torch.__version__}:{key}".encode()).hexdigest()
        return Path(cache_dir()) / "kvcompile" / self.kind / name


def _kept() -> bool:
    return bool(config.fx_graph_cache) and not config.force_disable_caches
