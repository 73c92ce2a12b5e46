"""Training text found on the machine: Python sources and prose, with a held-out split."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
HELDOUT_FILE = HERE / "heldout.py.txt"
HELDOUT_BYTES = 65_536
HELDOUT_EXCERPT = 12_000
HELDOUT_SHARE = 0.04

PROSE_SUFFIXES = (".rst", ".md", ".txt")
PROSE_NAMES = ("METADATA", "README", "LICENSE", "NEWS", "CHANGES")
NOT_PROSE = ("RECORD", "top_level.txt", "entry_points.txt", "SOURCES.txt", "CMakeLists.txt")
# Vendor packages under licenses that are not open are left out.
CLOSED = ("nvidia", "cuda")
MOST_FILE_BYTES = 400_000
FEWEST_FILE_BYTES = 200
LONG_LINE = 40
OVERLAP = 0.2
SEPARATOR = b"\n\n\n"


@dataclass(frozen=True)
class Corpus:
    """Text by kind as uint8 arrays of shape (N,), and what was found, for the log."""

    python: np.ndarray
    prose: np.ndarray
    report: dict[str, float]


def is_held_out(path: Path) -> bool:
    """Whether a file is kept from training, by the hash of its module name.

    The name and not the content decides, so that the same module of another release of
    Python falls on the same side.
    """
    name = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return number < HELDOUT_SHARE * 2**64


def heldout_text() -> bytes:
    """The held-out Python source that the repository ships."""
    return HELDOUT_FILE.read_bytes()


def roots() -> list[Path]:
    """Folders of this machine that hold Python packages and documents."""
    found = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), "/usr/lib/python3/dist-packages", "/usr/share/doc"]
    found += [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    return list(dict.fromkeys(Path(entry).resolve() for entry in found if Path(entry).is_dir()))


def kind_of(name: str) -> str | None:
    """The kind of text a file name promises: python, prose or None."""
    if name.endswith(".py"):
        return "python"
    if name in NOT_PROSE:
        return None
    if name.endswith(PROSE_SUFFIXES) or name.startswith(PROSE_NAMES):
        return "prose"
    return None


def candidates() -> list[tuple[str, str]]:
    """Kind and path of every file worth reading, in an order that the path's hash decides."""

    def walk() -> Iterator[tuple[str, str]]:
        for root in roots():
            for folder, folders, names in os.walk(root):
                if Path(folder) == root:
                    folders[:] = [f for f in folders if not f.startswith(CLOSED)]
                for name in names:
                    kind = kind_of(name)
                    if kind and not is_held_out(Path(folder, name)):
                        yield kind, os.path.join(folder, name)

    return sorted(set(walk()), key=lambda item: hashlib.sha256(item[1].encode()).digest())


def _long_lines(text: bytes) -> list[bytes]:
    return [line for line in map(bytes.strip, text.split(b"\n")) if len(line) >= LONG_LINE]


def _read(item: tuple[str, str]) -> tuple[str, bytes]:
    """Kind and cleaned text of one file; empty text where it is unfit for training."""
    kind, path = item
    try:
        if not FEWEST_FILE_BYTES <= os.path.getsize(path) <= MOST_FILE_BYTES:
            return kind, b""
        text = Path(path).read_bytes().replace(b"\r\n", b"\n")
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return kind, b""
    # Tables and minified data teach nothing: their lines are long.
    if b"\0" in text or len(text) > 150 * (text.count(b"\n") + 1):
        return kind, b""
    lines = _long_lines(text)
    shared = sum(line in _HELDOUT_LINES for line in lines)
    if lines and shared > OVERLAP * len(lines):
        return kind, b""
    return kind, text.strip()


_HELDOUT_LINES: frozenset[bytes] = frozenset()


def _start_reader() -> None:
    global _HELDOUT_LINES
    _HELDOUT_LINES = frozenset(_long_lines(heldout_text()))


def load(seconds: float = 60.0, most_bytes: int = 400_000_000) -> Corpus:
    """Reads the machine's text until time or bytes run out; copies of a file count once.

    Files whose lines overlap the shipped held-out text are dropped, whatever their names.
    """
    began = time.monotonic()
    parts: dict[str, list[bytes]] = {"python": [], "prose": []}
    seen: set[bytes] = set()
    total = 0
    files = candidates()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(16, os.cpu_count() or 1), mp_context=context, initializer=_start_reader
    ) as pool:
        for start in range(0, len(files), 4096):
            for kind, text in pool.map(_read, files[start : start + 4096], chunksize=64):
                digest = hashlib.blake2b(text, digest_size=16).digest()
                if text and digest not in seen:
                    seen.add(digest)
                    parts[kind].append(text)
                    total += len(text)
            if total > most_bytes or time.monotonic() - began > seconds:
                break
    python, prose = (
        np.frombuffer(SEPARATOR.join(parts[kind]), dtype=np.uint8) for kind in ("python", "prose")
    )
    report = {
        "python_bytes": len(python),
        "python_files": len(parts["python"]),
        "prose_bytes": len(prose),
        "prose_files": len(parts["prose"]),
        "candidate_files": len(files),
        "seconds": round(time.monotonic() - began, 1),
    }
    return Corpus(python, prose, report)


def write_heldout() -> None:
    """Writes the shipped held-out text: standard-library modules of the held-out split."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    names: list[str] = []
    paths = (p for p in stdlib.rglob("*.py") if is_held_out(p))
    inside = [p for p in paths if not {"test", "tests", "site-packages"} & {*p.parts}]
    for path in sorted(inside, key=lambda p: hashlib.sha256(p.name.encode()).digest()):
        text = path.read_bytes()
        if 2_000 <= len(text) <= 40_000 and text.isascii() and sum(map(len, parts)) < HELDOUT_BYTES:
            parts.append(text[:HELDOUT_EXCERPT].rpartition(b"\n")[0].strip())
            names.append(path.relative_to(stdlib).as_posix())
    whole = b"\n\n\n".join(parts)[:HELDOUT_BYTES]
    HELDOUT_FILE.write_bytes(whole)
    print(f"{len(whole)} bytes of Python {sys.version.split()[0]}: {', '.join(names)}")


def main() -> None:
    """Reports what this machine would give, or rewrites the shipped held-out text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write-heldout", action="store_true")
    if parser.parse_args().write_heldout:
        write_heldout()
    else:
        print(load().report)


if __name__ == "__main__":
    main()
