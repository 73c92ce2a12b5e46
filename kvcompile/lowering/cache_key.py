"""The salt of Inductor's on-disk cache: it hashes graphs, not out-of-tree lowerings, and would serve stale kernels.

A custom pass that changes nothing and whose ``uuid`` is a hash of our sources and of the plan stands in
Inductor's configuration, which is part of its key. Another such pass of the user's is kept and called.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from kvcompile.lowering.host.inductor_api import CustomGraphPass

PACKAGE = Path(__file__).resolve().parent.parent
SALTED = ("types.py", "backend.py", "schemes", "passes", "lowering")


@functools.cache
def sources_hash(package: Path = PACKAGE, names: tuple[str, ...] = SALTED) -> str:
    """A hash of every source that can change an emitted kernel, or of other files and folders of the package."""
    digest = hashlib.sha256()
    for name in names:
        root = package / name
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in {".py", ".jinja"})
        for path in files:
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class CacheKey(CustomGraphPass):
    """Changes no graph; ``uuid`` salts Inductor's cache key."""

    def __init__(self, plan: str, then: Any = None) -> None:
        self.plan, self.then = plan, then

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        if self.then is not None:
            self.then(graph)

    def uuid(self) -> str:
        """Sources, plan and the user's own pass."""
        inner = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return f"kvcompile:{sources_hash()}:{self.plan}:{inner}"
