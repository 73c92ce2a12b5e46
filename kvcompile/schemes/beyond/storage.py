"""Files of learned tables, with the fingerprint of their model.

A file holds ``<path>.<key or value>.<levels or thresholds>`` for every attention, float32 in scales, and as metadata the format, the
scheme's text and the fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import BadTables
from kvcompile.schemes.beyond.scheme import Beyond
from kvcompile.schemes.beyond.tables import ModelTables, SiteTables, Table
from kvcompile.schemes.model_file import ModelFile
from kvcompile.types import Role

FILE = ModelFile(
    "kvcompile-tables-1", "tables", BadTables, "learn tables for this model with kvcompile.learn, or load the file of this very model"
)


def save_tables(scheme: Beyond, path: str | Path, extra: Mapping[str, str] | None = None) -> None:
    """Write a trained scheme's tables; ``extra``: more metadata. The file appears whole or not at all."""
    if not isinstance(scheme.tables, ModelTables):
        raise BadTables(expected="a scheme with the tables of a model", found=scheme.spell(), todo="pass what kvcompile.learn returned")
    tensors = {
        f"{site}.{role.value}.{name}": plane
        for site, tables in scheme.tables.sites.items() for role in Role
        for name, plane in (("levels", tables.of(role).levels), ("thresholds", tables.of(role).thresholds))
    }
    FILE.write(path, tensors, {
        **(extra or {}), "scheme": scheme.spell(), "fingerprint": scheme.tables.fingerprint, "sites": json.dumps(list(scheme.tables.sites)),
    })


def load_tables(path: str | Path, model: torch.nn.Module) -> Beyond:
    """Read the scheme with tables that were learned for ``model``; raises BadTables where the file is damaged, foreign or another's."""
    scheme = read_tables(path)
    assert isinstance(scheme.tables, ModelTables)
    FILE.require_model(path, scheme.tables.fingerprint, model)
    return scheme


def read_tables(path: str | Path) -> Beyond:
    """Read a file of tables without holding it against a model."""
    with FILE.reading(path) as (opened, metadata):
        sites = {site: SiteTables(*(_table(opened, site, role) for role in Role)) for site in json.loads(metadata["sites"])}
        return _scheme(metadata, sites)


def _table(opened: Any, site: str, role: Role) -> Table:
    return Table(*(opened.get_tensor(f"{site}.{role.value}.{name}") for name in ("levels", "thresholds")))


def _scheme(metadata: Mapping[str, str], sites: dict[str, SiteTables]) -> Beyond:
    """The scheme of a file's metadata with its tables."""
    text = metadata["scheme"]
    name, _, rest = text.partition("(")
    options = dict(item.split("=", 1) for item in rest.removesuffix(")").split(","))
    if name != Beyond.name or set(options) != {"bits", "group", "scale_dtype", "trained"}:
        raise BadTables(expected=f"tables of the scheme {Beyond.name!r}", found=text, todo=FILE.todo)
    group, dtype = int(options["group"]), getattr(torch, options["scale_dtype"])
    plain = Beyond(int(options["bits"]), group, dtype, trained=True)
    return dataclasses.replace(plain, tables=ModelTables(sites, metadata["fingerprint"], group))
