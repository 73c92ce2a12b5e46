"""Files of what was measured or learned for one model: safetensors with its fingerprint, whole or not there at all.

What is truncated, foreign or for another model is refused, by the error of whoever reads. Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import SchemeError

SAMPLES = 64
"""Elements of each parameter that a fingerprint looks at, evenly spread."""


def plain_name(name: str) -> str:
    """A module's or a parameter's name without what wrappers put before its parts (``_orig_mod``, ``module``)."""
    return ".".join(part for part in name.split(".") if part not in {"_orig_mod", "module"})


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of a model's parameters, 32 hex digits: names, shapes and samples rounded to bfloat16, so that a copy in another dtype has it.

    Waits for the device.
    """
    found = hashlib.sha256()
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in sorted(named.items()):
        flat = parameter.detach().reshape(-1)
        at = torch.linspace(0, max(flat.numel() - 1, 0), min(SAMPLES, flat.numel()), dtype=torch.float64, device=flat.device).long()
        sample = flat[at].to(torch.bfloat16).cpu().view(torch.int16)
        found.update(f"{name} {tuple(parameter.shape)}\n".encode())
        found.update(sample.numpy().tobytes())
    return found.hexdigest()[:32]


@dataclass(frozen=True)
class ModelFile:
    """One kind of file: its mark, what it holds, the error of a file that is none, and how to get a good one."""

    mark: str
    holds: str
    error: type[SchemeError]
    todo: str

    def write(self, path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write tensors with metadata; the file appears whole or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file({name: plane.contiguous() for name, plane in tensors.items()}, str(half), {**metadata, "format": self.mark})
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)

    @contextlib.contextmanager
    def reading(self, path: str | Path) -> Iterator[tuple[Any, dict[str, str]]]:
        """Open a file of this kind: what gives tensors by name (``get_tensor``), and its metadata."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != self.mark:
                    raise self.error(expected=f"a file of {self.holds} ({self.mark})", found=f"{path} without that mark", todo=self.todo)
                yield opened, metadata
        except SchemeError:
            raise
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            found = f"{path}, which cannot be read ({type(error).__name__}: {error})"
            raise self.error(expected=f"a whole file of {self.holds}", found=found, todo=self.todo) from error

    def marks(self, path: str | Path) -> bool:
        """Whether a file can be opened and is of this kind."""
        try:
            with self.reading(path):
                return True
        except SchemeError:
            return False

    def require_model(self, path: str | Path, held: str, model: torch.nn.Module) -> None:
        """Raise the kind's error where a file's fingerprint is not that of a model."""
        if (found := fingerprint(model)) != held:
            raise self.error(
                expected=f"{self.holds} for this model (fingerprint {found})", found=f"{path} for another one ({held})", todo=self.todo
            )
