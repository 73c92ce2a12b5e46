"""Records of the measurements of one model or scheme, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompile.tools.evaluation.adaptation import Adaptation
from kvcompile.tools.evaluation.statistics import Proportion


@dataclass(frozen=True)
class Text:
    """Measures of predictions after prompts of ``length`` tokens; each tuple has one number per text.

    ``bits``: cross-entropy in bits per byte. ``kl``: divergence from the uncompressed model, nats per token. ``same``: how many of the
    ``predictions`` have the same likeliest token as the uncompressed model's. ``kinds``: kind of each text, such as prose or code; empty if
    a run has one kind.
    """

    length: int
    bits: tuple[float, ...]
    kl: tuple[float, ...]
    same: tuple[int, ...]
    predictions: int
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerError:
    """Difference of one attention module's outputs from the uncompressed model's: mean square, cosine, signal to noise in decibels."""

    length: int
    path: str
    mse: float
    cosine: float
    snr: float


@dataclass(frozen=True)
class Answer:
    """One question's outcome under one scheme; ``score``: share of the answer's parts that the model gave."""

    question: str
    task: str
    length: int
    depth: float
    expected: str
    said: str
    right: bool
    score: float


@dataclass(frozen=True)
class Held:
    """Bytes of one length's cache after its texts were decoded: allocated, and of a dense cache of the same tokens."""

    length: int
    allocated: int
    dense: int


@dataclass(frozen=True)
class Measured:
    """All figures of one scheme, or of the uncompressed model.

    ``telemetry``: the telemetry of certified attention while texts were decoded; ``asked``: its telemetry while questions were answered.
    ``adaptation``: widths of adaptive schemes, by length.
    """

    scheme: str
    texts: tuple[Text, ...] = ()
    layers: tuple[LayerError, ...] = ()
    answers: tuple[Answer, ...] = ()
    held: tuple[Held, ...] = ()
    seconds: float = 0.0
    graphs: int = 0
    refusals: tuple[str, ...] = ()
    telemetry: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    adaptation: tuple[Adaptation, ...] = ()

    @property
    def bits_per_byte(self) -> float:
        """Mean bits per byte over texts of all lengths."""
        return mean([value for text in self.texts for value in text.bits])

    @property
    def kl(self) -> float:
        """Mean KL over texts of all lengths, nats per token."""
        return mean([value for text in self.texts for value in text.kl])

    @property
    def agreement(self) -> Proportion:
        """Share of predictions with the uncompressed model's likeliest token."""
        return Proportion(sum(sum(text.same) for text in self.texts), sum(text.predictions * len(text.same) for text in self.texts))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the texts, each once, in order of first appearance."""
        return tuple(dict.fromkeys(kind for text in self.texts for kind in text.kinds))

    def figures(self, name: str, kind: str, length: int | None = None) -> list[float]:
        """Return the field ``name``, "bits" or "kl", of each text of one kind; ``length`` None: texts of all lengths."""
        return [
            value for text in self.texts if length in {None, text.length}
            for value, its in zip(getattr(text, name), text.kinds, strict=False) if its == kind
        ]

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated at the longest length; 0 if no text was decoded."""
        return max(self.held, key=lambda item: item.length).allocated if self.held else 0

    @property
    def dense_bytes(self) -> int:
        """Bytes of a dense cache at the longest length; 0 if no text was decoded."""
        return max(self.held, key=lambda item: item.length).dense if self.held else 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the answers, each once, in order of first appearance."""
        return tuple(dict.fromkeys(item.task for item in self.answers))

    def share(self, task: str | None = None, length: int | None = None, depth: float | None = None) -> Proportion:
        """Return the share of right answers to one task's questions, at one length and depth; None for any task, length or depth."""
        picked = [item.right for item in self.picked(task, length) if depth is None or item.depth == depth]
        return Proportion(sum(picked), len(picked))

    def picked(self, task: str | None = None, length: int | None = None) -> list[Answer]:
        """Return the answers of one task and one length; None for any task or length."""
        return [item for item in self.answers if task in {None, item.task} and length in {None, item.length}]


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return sum(values) / len(values) if values else float("nan")


def plain(item: Any) -> dict[str, Any]:
    """Return a record's fields as a dict, for JSON."""
    return dict(vars(item))
