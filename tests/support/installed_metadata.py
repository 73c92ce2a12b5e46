"""Installed metadata: what an installer writes of pyproject.toml, for tests; what is installed here may be of another commit."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from torch._dynamo.backends import registry

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@contextlib.contextmanager
def installed(site: Path) -> Iterator[None]:
    """Within the context, this checkout's entry points are installed in the folder ``site``, and Dynamo reads entry points anew."""
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    info = site / "kvcompile-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcompile\nVersion: 0\n")
    written = [f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in items.items()) for group, items in points.items()]
    (info / "entry_points.txt").write_text("\n".join(written))
    sys.path.insert(0, str(site))
    _forget()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        _forget()


def _forget() -> None:
    registry._lazy_import.cache_clear()
    registry._discover_entrypoint_backends.cache_clear()
    for known in (registry._BACKENDS, registry._COMPILER_FNS):
        known.pop("kvcompile", None)
