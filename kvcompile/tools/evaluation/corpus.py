"""Corpus: text of several kinds for evaluation, taken from the running Python if the user names no files."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = "specialnames"
"""The longest chapter of the language reference, 62 kB: one subject that exceeds a long prompt."""
MODULES = (
    "argparse.py", "asyncio/base_events.py", "calendar.py", "configparser.py", "decimal.py", "difflib.py", "fractions.py", "heapq.py",
    "http/client.py", "inspect.py", "ipaddress.py", "json/decoder.py", "pathlib.py", "pickle.py", "statistics.py", "subprocess.py",
    "tarfile.py", "textwrap.py", "turtle.py", "zipfile.py",
)
"""Modules of the standard library; those that this Python lacks are left out."""


@dataclass(frozen=True)
class Passage:
    """A text and its kind."""

    kind: str
    text: str


@functools.cache
def own_passages() -> tuple[Passage, ...]:
    """Return prose, code and one long document: chapters of the language reference and modules of the standard library."""
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[name] for name in sorted(topics) if name != DOCUMENT)
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join((library / name).read_text(encoding="utf-8") for name in MODULES if (library / name).is_file())
    return Passage("prose", prose), Passage("code", code), Passage("document", topics[DOCUMENT])


def fingerprint(passages: Sequence[Passage]) -> str:
    """Return the first 16 hex digits of the SHA-256 of all texts; equal texts give equal fingerprints."""
    whole = hashlib.sha256("\0".join(passage.text for passage in passages).encode())
    return whole.hexdigest()[:16]
