"""Verdict cache: verdicts by fingerprint; verdicts on equal programs may outlast the process."""

from __future__ import annotations

from typing import Protocol

from kvcompile.validation.equivalence import SiteOutcome, Verdict


class PersistentSet(Protocol):
    """A set of keys that outlasts the process."""

    def __contains__(self, key: str) -> bool: ...

    def add(self, key: str) -> None:
        """Add ``key`` to the set."""


class VerdictCache(dict[str, Verdict]):
    """Verdicts by fingerprint. Keys of EQUAL verdicts that do not differ on padding are also kept, and looked up, in ``persistent``."""

    def __init__(self, persistent: PersistentSet | None = None) -> None:
        super().__init__()
        self.persistent = persistent

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if self.persistent is None or not isinstance(key, str) or key not in self.persistent:
            return False
        super().__setitem__(key, Verdict(SiteOutcome.EQUAL))
        return True

    def __setitem__(self, key: str, verdict: Verdict) -> None:
        super().__setitem__(key, verdict)
        if self.persistent is not None and verdict.outcome is SiteOutcome.EQUAL and not verdict.differs_on_padding:
            self.persistent.add(key)
