"""Files of learned tables, with the fingerprint of their model.

A file holds ``<path>.<key or value>.<levels or thresholds>`` for every attention, float32 in units of scales, and as metadata the format,
the scheme's text and the fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from kvcompile.errors import BadTables, SchemeError
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.beyond.tables import ModelTables, SiteTables, Table
from kvcompile.files.tensor_file import Entry
from kvcompile.schemes.model_file import ModelFile, sites_of
from kvcompile.types import Role

FILE = ModelFile(
    "kvcompile-tables-1", "tables", BadTables, "learn tables for this model with kvcompile.learn, or load the file of this very model"
)

SPELLED = re.compile(Beyond.name + r"\(bits=(?P<bits>\d{1,2}),group=(?P<group>\d{1,6}),scale_dtype=(?P<dtype>\w+),trained=True\)")
"""The scheme's text in a file's metadata."""
REACH = 8
"""Learned levels and thresholds are within this many widths of a group from zero."""


def save_tables(scheme: Beyond, path: str | Path, extra: Mapping[str, str] | None = None) -> None:
    """Write a trained scheme's tables to the file ``path``; the option ``window`` is not saved. ``extra``: more metadata.

    The file appears whole or not at all. Raises BadTables for a scheme without the tables of a model.
    """
    if not isinstance(scheme.tables, ModelTables):
        raise BadTables(expected="a scheme with the tables of a model", found=scheme.spec(), todo="pass what kvcompile.learn returned")
    tensors = {
        f"{site}.{role.value}.{name}": plane
        for site, tables in scheme.tables.sites.items() for role in Role
        for name, plane in (("levels", tables.for_role(role).levels), ("thresholds", tables.for_role(role).thresholds))
    }
    FILE.write(path, tensors, {
        **(extra or {}), "scheme": dataclasses.replace(scheme, window=0).spec(), "fingerprint": scheme.tables.fingerprint,
        "sites": json.dumps(list(scheme.tables.sites)),
    })


def load_tables(path: str | Path, model: torch.nn.Module) -> Beyond:
    """Return the scheme with the tables in a file, which were learned for ``model``.

    Raises BadTables if the file is damaged, of another kind or of another model.
    """
    scheme = read_tables(path)
    assert isinstance(scheme.tables, ModelTables)
    FILE.require_model(path, scheme.tables.fingerprint, model)
    FILE.require_sites(path, scheme.tables.sites, model)
    return scheme


def read_tables(path: str | Path) -> Beyond:
    """Return the scheme with the tables in a file, without a check of the model. Raises BadTables if the file holds no tables."""
    tensors, metadata = FILE.read(path, _declared)
    sites = {site: SiteTables(*(_table(tensors, site, role) for role in Role)) for site in sites_of(metadata)}
    plain = _scheme(metadata)
    return dataclasses.replace(plain, tables=ModelTables(sites, metadata["fingerprint"], plain.group))


def _declared(metadata: Mapping[str, str], sites: list[str]) -> dict[str, Entry]:
    """Return the tensors that a file of these metadata must hold: levels and thresholds of keys and values of every attention in ``sites``.

    Their ranges are those that learning can reach.
    """
    count = 2 ** _scheme(metadata).bits
    # A group's values are in [0, count - 1]; learned levels may be outside of it, by less than a few times its width.
    entries = {name: Entry((None, None, size), least=-REACH * count, most=REACH * count, rising=name == "thresholds")
               for name, size in (("levels", count), ("thresholds", count - 1))}
    return {f"{site}.{role.value}.{name}": entry for site in sites for role in Role for name, entry in entries.items()}


def _table(tensors: Mapping[str, torch.Tensor], site: str, role: Role) -> Table:
    return Table(*(tensors[f"{site}.{role.value}.{name}"] for name in ("levels", "thresholds")))


def _scheme(metadata: Mapping[str, str]) -> Beyond:
    """Return the scheme that a file's metadata names, without tables. Raises BadTables if it is not the scheme beyond."""
    text = metadata.get("scheme", "")
    found = SPELLED.fullmatch(text)
    dtype = getattr(torch, found["dtype"], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise BadTables(expected=f"tables of the scheme {Beyond.name!r}", found=text, todo=FILE.todo)
    try:
        return Beyond(int(found["bits"]), int(found["group"]), dtype, trained=True)
    except SchemeError as error:
        raise BadTables(expected=f"tables of the scheme {Beyond.name!r}", found=f"{text} ({error})", todo=FILE.todo) from error
