"""Kinds of cache slots: how a cache tensor enters and leaves a graph, and the facts that follow from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class SlotKind(enum.Enum):
    """The kind of a slot, by how its cache tensor enters and leaves the graph."""

    BUFFER = "input written in place"
    UPDATED = "input updated out of place, result returned"
    CONCAT = "input concatenated with the new tokens, result returned"
    CREATED_CONCAT = "first tokens returned as a new cache"
    CREATED_BUFFER = "buffer made in this graph and returned"
    READ = "input that is only read"
    NEW = "tokens of this call that no cache holds"

    @property
    def facts(self) -> KindFacts:
        """The facts that hold for slots of this kind: whether they are created, written in place, growing, and so on."""
        return KINDS[self]


@dataclass(frozen=True)
class KindFacts:
    """The facts in which kinds of slots differ; other code tests a fact, never a kind."""

    cache: str
    """Description of the cache in reports."""
    created: bool = False
    """Whether this graph makes the cache; otherwise an argument holds it before the call."""
    written: bool = True
    """Whether this graph writes new tokens."""
    in_place: bool = False
    """Whether new tokens are written into the tensor's own memory."""
    grows: bool = False
    """Whether the tensor holds exactly the cached tokens, so that a call returns a longer one."""
    fixed: bool = False
    """Whether the tensor has room for every position, and this graph writes new tokens at some of them."""

    @property
    def filled(self) -> bool:
        """Whether new tokens are written to positions of an argument that keeps its length."""
        return self.fixed and not self.created

    @property
    def extended(self) -> bool:
        """Whether new tokens are appended to an argument."""
        return self.grows and not self.created

    @property
    def adopted(self) -> bool:
        """Whether later calls pass the same tensor again, so that a dense argument may be given a compressed store."""
        return self.in_place or not (self.written or self.created)

    @property
    def returned(self) -> bool:
        """Whether a call returns the cache as a tensor other than the argument."""
        return self.written and (self.created or not self.in_place)


KINDS = {
    SlotKind.BUFFER: KindFacts("written in place", in_place=True, fixed=True),
    SlotKind.UPDATED: KindFacts("updated out of place", fixed=True),
    SlotKind.CONCAT: KindFacts("grows each step", grows=True),
    SlotKind.CREATED_CONCAT: KindFacts("starts here", created=True, grows=True),
    SlotKind.CREATED_BUFFER: KindFacts("made and filled here", created=True, in_place=True, fixed=True),
    SlotKind.READ: KindFacts("filled before", written=False),
    SlotKind.NEW: KindFacts("none", created=True, written=False),
}
