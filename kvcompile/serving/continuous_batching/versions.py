"""Versions of transformers whose continuous batching is known, with what differs between them."""

from __future__ import annotations

import dataclasses
import re

from kvcompile.errors import EngineUnfit

ENGINE = "transformers' continuous batching"


@dataclasses.dataclass(frozen=True)
class CallNames:
    """How a version names our attention function, and the arguments that it calls it with.

    ``name``: the function's. Behind "flash" the engine makes no mask; 5.18 asks for "paged|", which later versions cut off.
    ``queries``, ``keys``: the names of the longest query and of the longest row; ``by_type``: lengths of keys come in a dict by layer type,
    also where a model has one type alone.
    """

    name: str
    queries: str
    keys: str
    by_type: bool


FIRST = CallNames("paged|kvcompile_flash", "max_seqlen_q", "max_seqlen_k", by_type=False)
PRESENT = CallNames("kvcompile_flash", "max_length_q", "max_length_k", by_type=True)
VERSIONS = {(5, 18): FIRST, (5, 19): PRESENT, (5, 20): PRESENT, (5, 21): PRESENT, (5, 22): PRESENT, (5, 23): PRESENT}


def arguments_of(version: str) -> CallNames:
    """Return the names of a version of transformers, ``5.23.0``. Raises EngineUnfit for one that was never tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    known = VERSIONS.get((int(found[1]), int(found[2]))) if found else None
    if known is None:
        first, last = min(VERSIONS), max(VERSIONS)
        raise EngineUnfit(
            engine=ENGINE, expected=f"transformers {first[0]}.{first[1]} to {last[0]}.{last[1]}", found=version,
            todo="install one of these: each changes inner classes (5.17 takes kvcompile.backend in varlen_compile_config)",
        )
    return known
