"""Known: the verdicts that were reached, of which those of equal programs may outlast the process."""

from __future__ import annotations

from typing import Protocol

from kvcompile.validation.equivalence import Outcome, Verdict


class Lasting(Protocol):
    """A set of keys that outlasts the process."""

    def __contains__(self, key: str) -> bool: ...

    def add(self, key: str) -> None:
        """Keep a key."""


class Known(dict[str, Verdict]):
    """Verdicts by fingerprint; ``lasting`` gets those of programs that were found EQUAL and need no note, and is asked for them."""

    def __init__(self, lasting: Lasting | None = None) -> None:
        super().__init__()
        self.lasting = lasting

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if self.lasting is None or not isinstance(key, str) or key not in self.lasting:
            return False
        super().__setitem__(key, Verdict(Outcome.EQUAL))
        return True

    def __setitem__(self, key: str, verdict: Verdict) -> None:
        super().__setitem__(key, verdict)
        if self.lasting is not None and verdict.outcome is Outcome.EQUAL and not verdict.blind:
            self.lasting.add(key)
