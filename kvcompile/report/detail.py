"""Details of a graph that a report shows on request, as text: its attentions before and after the rewrite, and their kernels."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LineKind(enum.Enum):
    """The role of a node of a listing in its site."""

    ATTENTION = "attention"
    WRITE = "write"
    CACHE = "cache"
    OTHER = "other"


@dataclass(frozen=True)
class GraphLine:
    """One node of a graph: its name, type and shape, and the call that makes it."""

    name: str
    shape: str
    call: str
    kind: LineKind


@dataclass(frozen=True)
class Listing:
    """A part of a graph in order, at most ``details.LONGEST`` nodes. ``left_out``: nodes of the region beyond that."""

    title: str
    lines: tuple[GraphLine, ...]
    left_out: int = 0


@dataclass(frozen=True)
class KernelText:
    """The generated kernel of some sites, as ``kvcompile dump --stage triton`` prints it; or the reason why there is none (``why``)."""

    paths: tuple[str, ...]
    source: str = ""
    why: str = ""


@dataclass(frozen=True)
class SiteDetail:
    """One attention: its part of the graph before, and after the rewrite in each variant; no ``after`` if it was refused."""

    path: str
    before: Listing
    after: tuple[Listing, ...] = ()


@dataclass(frozen=True)
class GraphDetail:
    """The details of one graph: its rewritten sites in order, its refused attentions in order, and its kernels."""

    sites: tuple[SiteDetail, ...] = ()
    refused: tuple[SiteDetail, ...] = ()
    kernels: tuple[KernelText, ...] = ()
