"""Files of measured or learned data of one model: safetensors with the model's fingerprint, written whole or not at all.

A truncated or foreign file, or one of another model, is refused with the error of its kind. Nothing in a file is ever executed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from kvcompile.errors import FileUnfit, KvcompileError
from kvcompile.files.declared import AtLeast
from kvcompile.files.json_file import parsed
from kvcompile.files.tensor_file import DIGEST, Entry, digest, follow_umask, read_tensors
from kvcompile.schemes.site_paths import matches, shown

SAMPLES = 64
"""Elements of each parameter that a fingerprint hashes, evenly spread."""


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the parts that wrappers add (``_orig_mod``, ``module``)."""
    return ".".join(part for part in name.split(".") if part not in {"_orig_mod", "module"})


def fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of a model's parameters, 32 hex digits. Waits for the device.

    It covers names, shapes and samples rounded to bfloat16, so that a copy of the model in another dtype has the same fingerprint.
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


Declare = Callable[[Mapping[str, str], list[str]], Mapping[str, Entry]]
"""Returns the tensors that a file must hold, from its metadata and its module paths."""


@dataclass(frozen=True)
class ModelFile:
    """A kind of file: the mark that identifies it, a name for its contents, the error for a bad file, and advice on getting a good one."""

    mark: str
    holds: str
    error: type[KvcompileError]
    todo: str

    def write(self, path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write tensors with metadata; the file appears whole or not at all."""
        from safetensors.torch import save_file

        path = Path(path)
        metadata = {**metadata, "format": self.mark}
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            planes = {name: plane.contiguous() for name, plane in tensors.items()}
            save_file(planes, str(unfinished), {**metadata, DIGEST: digest(planes, metadata)})
            follow_umask(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def read(self, path: str | Path, declare: Declare) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors and metadata of a file of this kind. Raises the kind's error if it cannot be read or is not as declared.

        ``declare``: (metadata, module paths in its entry ``sites``) -> the tensors that the file must hold.
        """

        def declared(metadata: Mapping[str, str], names: frozenset[str]) -> Mapping[str, Entry]:
            del names
            if metadata.get("format") != self.mark:
                raise self.error(expected=f"a file of {self.holds} ({self.mark})", found=f"{path} without that mark", todo=self.todo)
            if not isinstance(metadata.get("fingerprint"), str):
                raise FileUnfit(where="fingerprint", expected="the fingerprint of a model", found="none")
            return declare(metadata, sites_of(metadata))

        try:
            return read_tensors(Path(path), declared)
        except FileUnfit as error:
            raise self.refused(path, error) from error

    def refused(self, path: str | Path, error: FileUnfit) -> KvcompileError:
        """Return this kind's error for a file ``path`` whose contents are not as declared; ``error``: the first fault found."""
        return self.error(expected=f"a whole file of {self.holds}", found=f"{path}, which cannot be read ({error.fact})", todo=self.todo)

    def marks(self, path: str | Path) -> bool:
        """Return whether ``path`` is a readable safetensors file whose metadata names this format; False for any other file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as opened:
                return (opened.metadata() or {}).get("format") == self.mark
        except (OSError, SafetensorError):
            return False

    def require_model(self, path: str | Path, held: str, model: torch.nn.Module) -> None:
        """Raise the kind's error if the fingerprint ``held`` by a file is not the model's."""
        if (found := fingerprint(model)) != held:
            raise self.error(
                expected=f"{self.holds} for this model (fingerprint {found})", found=f"{path} for another one ({held})", todo=self.todo
            )

    def require_sites(self, where: str | Path, sites: Iterable[str], model: torch.nn.Module) -> None:
        """Raise the kind's error if one of the module paths ``sites`` matches no module of the model (``site_paths.matches``)."""
        modules = [plain_name(name) for name, _ in model.named_modules()]
        strange = [path for path in sites if path not in modules and not any(matches(path, module) for module in modules if module)]
        if strange:
            raise self.error(
                expected=f"{self.holds} by the module paths of this model", found=f"{len(strange)} others in {where}: {shown(strange)}",
                todo="pass the model that this file is of",
            )


def sites_of(metadata: Mapping[str, str]) -> list[str]:
    """Return the module paths in a file's metadata: at least one, without repeats. Raises FileUnfit otherwise."""
    sites: list[str] = parsed(metadata.get("sites", ""), Annotated[list[str], AtLeast(1)], "sites")
    if len(set(sites)) != len(sites):
        twice = shown(sorted(path for path in sites if sites.count(path) > 1))
        raise FileUnfit(where="sites", expected="each module path once", found=twice)
    return sites
