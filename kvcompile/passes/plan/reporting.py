"""Reporting: check that a site and its schemes support error reports, and add the plane that accumulates them to a layout. Pure.

An error report is a bound on the distance between a step's result and attention over full-precision tokens.
"""

from __future__ import annotations

import dataclasses

from kvcompile.errors import NotBounded, NotReported
from kvcompile.passes.match.sites import Site
from kvcompile.schemes import Scheme
from kvcompile.schemes.certificate.telemetry import REFILLED_PLANE, TELEMETRY_PLANE
from kvcompile.types import Layout, Role, SlotSpec

TALLY = dataclasses.replace(TELEMETRY_PLANE, tally=True)


def check_site(site: Site, rolling: int | None) -> None:
    """Raise NotReported if attention reads other tokens than were cached (latents, paged or sliding caches).

    ``rolling``: the capacity of a buffer with moving tokens, else None.
    """
    found = None
    if site.assembly is not None:
        found = "ones that are made from a cached latent"
    elif any(slot.block_table is not None for slot in site.slots):
        found = "ones that are gathered from a pool"
    elif rolling is not None or any(slot.sliding is not None for slot in site.slots):
        found = "a cache that keeps its newest tokens only"
    if found is not None:
        raise NotReported(found=found, path=site.path or "*")


def check_scheme(scheme: Scheme, slot: SlotSpec, path: str) -> None:
    """Raise NotBounded or NotReported if the encoding of ``slot`` has no error bound, or keys are stored before RoPE."""
    if scheme.radius(slot) is None:
        raise NotBounded(scheme=scheme.spec())
    if scheme.pre_rope:
        raise NotReported(found="keys that are stored before their rotary embedding", path=path)


def with_tally(layout: Layout, slot: SlotSpec) -> Layout:
    """Return a key slot's layout with the plane of error reports appended; a value slot's layout unchanged.

    With a window, a plane that marks refills of the window precedes it.
    """
    if slot.role is not Role.KEY:
        return layout
    windowed = any(plane.name == "window" for plane in layout.planes)
    return Layout((*layout.planes, *([REFILLED_PLANE] if windowed else []), TALLY))
