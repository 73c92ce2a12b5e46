"""The versions of vLLM with which the plugin was tried."""

from __future__ import annotations

import re

from kvcompile.errors import EngineUnfit

ENGINE = "vLLM"
FIRST, LAST = (0, 32), (0, 32)
"""The first and the last minor version whose engine was started with the plugin."""


def require_known(version: str) -> None:
    """Raise EngineUnfit for a version of vLLM, such as ``0.32.0+cpu``, with which the plugin was never tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) <= LAST:
        known = ".".join(map(str, FIRST)) if FIRST == LAST else f"{'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))}"
        raise EngineUnfit(
            engine=ENGINE, expected=f"vLLM {known}", found=version,
            todo="install it, or unset KVCOMPILE_SCHEME: the classes that a backend derives from change with each version",
        )
