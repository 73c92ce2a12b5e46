"""Files of learned tables: safetensors with the model's fingerprint; what is truncated, foreign or for another model is refused.

A file holds ``<path>.<key or value>.<levels or thresholds>`` for every attention, float32 in scales, and as metadata the format, the
scheme's text and the fingerprint. Nothing in it is ever executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from kvcompile.errors import BadTables, SchemeError
from kvcompile.schemes.beyond.scheme import Beyond
from kvcompile.schemes.beyond.tables import ModelTables, SiteTables, Table
from kvcompile.types import Role

FORMAT = "kvcompile-tables-1"
SAMPLES = 64
"""Elements of each parameter that a fingerprint looks at, evenly spread."""
FRESH_LEARN = "learn tables for this model with kvcompile.learn, or load the file of this very model"


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of a model's parameters, 32 hex digits: names, shapes and samples rounded to bfloat16, so that a copy in another dtype has it.

    Names lose what wrappers put before them (``_orig_mod``, ``module``). Waits for the device.
    """
    found = hashlib.sha256()
    named = {".".join(part for part in name.split(".") if part not in {"_orig_mod", "module"}): p for name, p in model.named_parameters()}
    for name, parameter in sorted(named.items()):
        flat = parameter.detach().reshape(-1)
        at = torch.linspace(0, max(flat.numel() - 1, 0), min(SAMPLES, flat.numel()), dtype=torch.float64, device=flat.device).long()
        sample = flat[at].to(torch.bfloat16).cpu().view(torch.int16)
        found.update(f"{name} {tuple(parameter.shape)}\n".encode())
        found.update(sample.numpy().tobytes())
    return found.hexdigest()[:32]


def save_tables(scheme: Beyond, path: str | Path, extra: Mapping[str, str] | None = None) -> None:
    """Write a trained scheme's tables; ``extra``: more metadata. The file appears whole or not at all."""
    from safetensors.torch import save_file

    if not isinstance(scheme.tables, ModelTables):
        raise BadTables(expected="a scheme with the tables of a model", found=scheme.spell(), todo="pass what kvcompile.learn returned")
    tensors = {
        f"{site}.{role.value}.{name}": plane.contiguous()
        for site, tables in scheme.tables.sites.items() for role in Role
        for name, plane in (("levels", tables.of(role).levels), ("thresholds", tables.of(role).thresholds))
    }
    metadata = {
        **(extra or {}), "format": FORMAT, "scheme": scheme.spell(), "fingerprint": scheme.tables.fingerprint,
        "sites": json.dumps(list(scheme.tables.sites)),
    }
    path = Path(path)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, str(half), metadata)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def load_tables(path: str | Path, model: torch.nn.Module) -> Beyond:
    """Read the scheme with tables that were learned for ``model``; raises BadTables where the file is damaged, foreign or another's."""
    scheme = read_tables(path)
    assert isinstance(scheme.tables, ModelTables)
    if (found := fingerprint(model)) != scheme.tables.fingerprint:
        raise BadTables(
            expected=f"tables for this model (fingerprint {found})", found=f"{path} for another one ({scheme.tables.fingerprint})",
            todo=FRESH_LEARN,
        )
    return scheme


def read_tables(path: str | Path) -> Beyond:
    """Read a file of tables without holding it against a model."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise BadTables(expected=f"a file of tables ({FORMAT})", found=f"{path} without that mark", todo=FRESH_LEARN)
            sites = {site: SiteTables(*(_table(opened, site, role) for role in Role)) for site in json.loads(metadata["sites"])}
            return _scheme(metadata, sites)
    except SchemeError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadTables(
            expected="a whole file of tables", found=f"{path}, which cannot be read ({type(error).__name__}: {error})", todo=FRESH_LEARN
        ) from error


def _table(opened: object, site: str, role: Role) -> Table:
    return Table(*(opened.get_tensor(f"{site}.{role.value}.{name}") for name in ("levels", "thresholds")))  # type: ignore[attr-defined]


def _scheme(metadata: Mapping[str, str], sites: dict[str, SiteTables]) -> Beyond:
    """The scheme of a file's metadata with its tables."""
    text = metadata["scheme"]
    name, _, rest = text.partition("(")
    options = dict(item.split("=", 1) for item in rest.removesuffix(")").split(","))
    if name != Beyond.name or set(options) != {"bits", "group", "scale_dtype", "trained"}:
        raise BadTables(expected=f"tables of the scheme {Beyond.name!r}", found=text, todo=FRESH_LEARN)
    group, dtype = int(options["group"]), getattr(torch, options["scale_dtype"])
    plain = Beyond(int(options["bits"]), group, dtype, trained=True)
    return dataclasses.replace(plain, tables=ModelTables(sites, metadata["fingerprint"], group))
