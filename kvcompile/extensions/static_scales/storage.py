"""Files of static scales, with the fingerprint of their model.

A file holds ``<path>.<key or value>``, float32 [1] or [kv heads], for every attention, and as metadata the format, the scheme's name, the
list of module paths (``sites``) and the fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from kvcompile.errors import BadScales
from kvcompile.extensions.static_scales.scales import LEAST_SCALE, MOST_SCALE, ModelScales, Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import Calibrated, static_of, with_scales
from kvcompile.files.tensor_file import Entry
from kvcompile.schemes.model_file import ModelFile, sites_of
from kvcompile.types import Role

FILE = ModelFile(
    "kvcompile-scales-1", "static scales", BadScales,
    "calibrate this model with kvcompile.calibrate, or load the file of this very model",
)


def save_scales(scheme: Calibrated, path: str | Path, extra: Mapping[str, str] | None = None) -> None:
    """Write the scales of a measured scheme to the file ``path``; the option ``window`` is not saved. ``extra``: more metadata.

    The file appears whole or not at all. Raises BadScales for a scheme without the scales of a model.
    """
    if not isinstance(scheme.scales, ModelScales):
        raise BadScales(
            expected="a scheme with the scales of a model", found=scheme.spec(),
            todo="pass what kvcompile.calibrate or kvcompile.read_scales returned",
        )
    tensors = {f"{site}.{role.value}": scales.for_role(role).values for site, scales in scheme.scales.sites.items() for role in Role}
    FILE.write(path, tensors, {
        **(extra or {}), "scheme": scheme.name, "fingerprint": scheme.scales.fingerprint, "sites": json.dumps(list(scheme.scales.sites)),
    })


def load_scales(path: str | Path, model: torch.nn.Module) -> Calibrated:
    """Return the scheme with the scales in a file, which were measured on ``model``.

    Raises BadScales if the file is damaged, of another kind or of another model.
    """
    tensors, metadata = FILE.read(path, _declared)
    kind = static_of(metadata.get("scheme", ""))
    if kind is None:
        raise BadScales(expected="scales of a scheme that has static ones", found=metadata.get("scheme"), todo=FILE.todo)
    FILE.require_model(path, metadata["fingerprint"], model)
    sites = sites_of(metadata)
    FILE.require_sites(path, sites, model)
    scales = {site: SiteScales(*(Scales(tensors[f"{site}.{role.value}"]) for role in Role)) for site in sites}
    return with_scales(kind, ModelScales(scales, metadata["fingerprint"]))


def _declared(metadata: Mapping[str, str], sites: list[str]) -> dict[str, Entry]:
    """Return the tensors that a file with this metadata must hold: for the keys and the values of every attention, [1] or [kv heads]."""
    del metadata
    return {f"{site}.{role.value}": Entry((None,), least=LEAST_SCALE, most=MOST_SCALE) for site in sites for role in Role}
