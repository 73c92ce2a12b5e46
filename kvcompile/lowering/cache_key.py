"""The salt of Inductor's on-disk cache: Inductor hashes graphs, not out-of-tree lowerings, and would serve stale kernels.

A custom pass that changes nothing, with a hash of our sources and of the plan as its ``uuid``, is put into Inductor's
configuration, which is part of the cache key. A pass of the user's in the same option is kept and called.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import time
from pathlib import Path
from typing import Any

import torch

from kvcompile.lowering.host.inductor_entry import CustomGraphPass
from kvcompile.schemes import Scheme, loaded

PACKAGE = Path(__file__).resolve().parent.parent
SALTED = ("types.py", "compilation.py", "variants.py", "schemes", "passes", "lowering", "extensions", "serving")


def sources_hash(package: Path = PACKAGE, names: tuple[str, ...] = SALTED) -> str:
    """Return a hash of every source that can change an emitted kernel, schemes from other packages included.

    ``names``: the files and folders of ``package`` that count.
    """
    return _hash(package, names, loaded())


@functools.cache
def _hash(package: Path, names: tuple[str, ...], schemes: tuple[type[Scheme], ...]) -> str:
    digest = hashlib.sha256()
    for scheme in schemes:
        if not scheme.__module__.startswith("kvcompile."):
            digest.update(f"{scheme.name} {_source(scheme)}\n".encode())
    for name in names:
        root = package / name
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in {".py", ".jinja"})
        for path in files:
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _source(scheme: type[Scheme]) -> str:
    """Return the source of a scheme's module and class; without a file, a text unique to this process."""
    try:
        return inspect.getsource(inspect.getmodule(scheme) or scheme) + inspect.getsource(scheme)
    except (OSError, TypeError):
        return f"{id(scheme)} {os.getpid()} {time.time_ns()}"


class CacheKey(CustomGraphPass):
    """A pass that changes no graph; its ``uuid`` salts Inductor's cache key."""

    def __init__(self, plan: str, then: Any = None) -> None:
        self.plan, self.then = plan, then

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        if self.then is not None:
            self.then(graph)

    def uuid(self) -> str:
        """Return the key: hash of the sources, plan, and the user's own pass."""
        inner = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return f"kvcompile:{sources_hash()}:{self.plan}:{inner}"
