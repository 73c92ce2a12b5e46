"""The versions of transformers whose continuous batching was tried, and the names that differ between them."""

from __future__ import annotations

import dataclasses
import re

from kvcompile.errors import EngineUnfit

ENGINE = "transformers' continuous batching"


@dataclasses.dataclass(frozen=True)
class CallNames:
    """The name under which a version of transformers finds our attention function, and the names of the arguments that it passes.

    ``name``: the function's name. The engine makes no mask for a name that contains "flash"; 5.18 needs the prefix "paged|", which later
    versions remove. ``queries``, ``keys``: the names of the arguments with the longest query and the longest row. ``by_type``: the lengths
    of keys are a dict by layer type, even if the model has only one type.
    """

    name: str
    queries: str
    keys: str
    by_type: bool


FIRST = CallNames("paged|kvcompile_flash", "max_seqlen_q", "max_seqlen_k", by_type=False)
PRESENT = CallNames("kvcompile_flash", "max_length_q", "max_length_k", by_type=True)
VERSIONS = {(5, 18): FIRST, (5, 19): PRESENT, (5, 20): PRESENT, (5, 21): PRESENT, (5, 22): PRESENT, (5, 23): PRESENT}


def arguments_of(version: str) -> CallNames:
    """Return the names that a version of transformers, such as ``5.23.0``, uses. Raises EngineUnfit for a version that was never tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    known = VERSIONS.get((int(found[1]), int(found[2]))) if found else None
    if known is None:
        first, last = min(VERSIONS), max(VERSIONS)
        raise EngineUnfit(
            engine=ENGINE, expected=f"transformers {first[0]}.{first[1]} to {last[0]}.{last[1]}", found=version,
            todo="install one of these: each changes inner classes (5.17 takes kvcompile.backend in varlen_compile_config)",
        )
    return known
