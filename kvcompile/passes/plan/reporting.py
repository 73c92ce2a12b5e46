"""Reporting: which attentions over codes can say how far they are from their originals, and where what they say is added up. Pure."""

from __future__ import annotations

import dataclasses

from kvcompile.errors import NotBounded, NotReported
from kvcompile.passes.match.sites import Site
from kvcompile.schemes import Scheme
from kvcompile.schemes.certificate.telemetry import REFILLED_PLANE, TELEMETRY_PLANE
from kvcompile.types import Layout, Role, SlotSpec

TALLY = dataclasses.replace(TELEMETRY_PLANE, tally=True)


def check_site(site: Site, rolling: int | None) -> None:
    """Raise NotReported where what attention reads is not what was cached; ``rolling``: the capacity of a buffer whose tokens move."""
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
    """Raise NotBounded or NotReported where what a scheme stores says too little of the originals."""
    if scheme.radius(slot) is None:
        raise NotBounded(scheme=scheme.spec())
    if scheme.pre_rope:
        raise NotReported(found="keys that are stored before their rotary embedding", path=path)


def with_tally(layout: Layout, slot: SlotSpec) -> Layout:
    """A layout with the plane that an attention's reports are added to, behind all others of its keys; and what a window refilled."""
    if slot.role is not Role.KEY:
        return layout
    windowed = any(plane.name == "window" for plane in layout.planes)
    return Layout((*layout.planes, *([REFILLED_PLANE] if windowed else []), TALLY))
