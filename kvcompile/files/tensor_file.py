"""Safetensors files with declared tensors: names, shapes, dtypes and ranges are checked before anything is returned."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcompile.errors import FileUnfit

DIGEST = "digest"
"""Metadata entry with a hash of all tensors and of the other metadata."""


@dataclass(frozen=True)
class Entry:
    """One declared tensor: shape (None for any size), dtype, range of its elements; ``rising``: sorted along the last axis.

    NaN and infinities are outside every range. ``any_bits``: codes or tokens, whose elements may be anything.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    least: float = -math.inf
    most: float = math.inf
    rising: bool = False
    any_bits: bool = False

    def check(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged. Raises FileUnfit if its shape, dtype, range or order is not as declared."""
        fits = tensor.dim() == len(self.shape) and all(
            wanted in {None, size} for wanted, size in zip(self.shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype != self.dtype:
            shape = ", ".join("any" if size is None else str(size) for size in self.shape)
            raise FileUnfit(where=name, expected=f"{self.dtype} [{shape}]", found=f"{tensor.dtype} {list(tensor.shape)}")
        if self.any_bits:
            return tensor
        if not bool((tensor.isfinite() & (tensor >= self.least) & (tensor <= self.most)).all()):
            raise FileUnfit(where=name, expected=f"finite numbers from {self.least:g} to {self.most:g}", found="others among them")
        if self.rising and bool((tensor.diff(dim=-1) < 0).any()):
            raise FileUnfit(where=name, expected="numbers in rising order", found="some that fall")
        return tensor


Declare = Callable[[Mapping[str, str], frozenset[str]], Mapping[str, Entry]]
"""Returns the tensors that a file must hold, from its metadata and the names of its tensors."""


def read_tensors(path: Path, declare: Declare) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a file's tensors, on the CPU, and its metadata. Raises FileUnfit unless they are exactly as ``declare`` returns.

    If the file has a digest it must match: no byte of tensors or metadata has changed since it was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as opened:
            metadata, names = opened.metadata() or {}, frozenset(opened.keys())
            declared = declare(metadata, names)
            if names != declared.keys():
                odd = min(names ^ declared.keys())
                expected, found = ("a tensor", "none") if odd in declared else ("no such tensor", "one")
                raise FileUnfit(where=odd, expected=expected, found=found)
            tensors = {name: entry.check(name, opened.get_tensor(name)) for name, entry in declared.items()}
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
        raise FileUnfit(where=path.name, expected="a whole file of safetensors", found=f"{type(error).__name__}: {error}") from error
    if metadata.get(DIGEST, None) not in {None, digest(tensors, metadata)}:
        raise FileUnfit(where=path.name, expected="what was written into it", found="other tensors or metadata than its digest is of")
    return tensors, metadata


def follow_umask(path: Path) -> None:
    """Give a file the permissions of any new file of this user (its umask): safetensors makes files that nobody else can read."""
    # The umask can only be read by setting it; files made by the system's own call follow it.
    made = path.with_name(f"{path.name}.rights")
    made.touch()
    try:
        path.chmod(made.stat().st_mode & 0o777)
    finally:
        made.unlink()


def digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return a hash, 32 hex digits, of tensors and of the metadata without its digest entry."""
    found = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != DIGEST:
            found.update(f"{name}\0{text}\0".encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]
