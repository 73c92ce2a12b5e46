"""Records of what was measured of one model or scheme, as plain data that JSON holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcompile.tools.evaluation.adaptation import Adaptation
from kvcompile.tools.evaluation.statistics import Share


@dataclass(frozen=True)
class Text:
    """Predictions behind prompts of one length, a number for each text.

    ``bits``: per byte. ``kl``: nats a token from the uncompressed model. ``same``: tokens whose likeliest next one is that of the
    uncompressed model, of ``predictions``.
    """

    length: int
    bits: tuple[float, ...]
    kl: tuple[float, ...]
    same: tuple[int, ...]
    predictions: int


@dataclass(frozen=True)
class Layer:
    """How far one attention module's outputs are from those of the uncompressed model: mean square, cosine, signal to noise in decibels."""

    length: int
    path: str
    mse: float
    cosine: float
    snr: float


@dataclass(frozen=True)
class Answer:
    """One question's outcome; ``score`` is the share of the answer's parts that were said."""

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
    """Bytes of one length's cache once its texts were decoded: allocated, as ``report()`` says, and of its dense tokens."""

    length: int
    allocated: int
    dense: int


@dataclass(frozen=True)
class Measured:
    """All figures of one scheme, or of the uncompressed model.

    ``telemetry``: of certified attention while texts were decoded. ``asked``: the same while questions were answered. ``adaptation``: of
    schemes whose tokens change their widths, by length.
    """

    scheme: str
    texts: tuple[Text, ...] = ()
    layers: tuple[Layer, ...] = ()
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
        """Mean over texts of all lengths."""
        return mean([value for text in self.texts for value in text.bits])

    @property
    def kl(self) -> float:
        """Mean over texts of all lengths, nats a token."""
        return mean([value for text in self.texts for value in text.kl])

    @property
    def agreement(self) -> Share:
        """Tokens with the likeliest next one of the uncompressed model."""
        return Share(sum(sum(text.same) for text in self.texts), sum(text.predictions * len(text.same) for text in self.texts))

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated at the longest length."""
        return max(self.held, key=lambda item: item.length).allocated if self.held else 0

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense tensors at the longest length."""
        return max(self.held, key=lambda item: item.length).dense if self.held else 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that were asked, in order."""
        return tuple(dict.fromkeys(item.task for item in self.answers))

    def share(self, task: str | None = None, length: int | None = None, depth: float | None = None) -> Share:
        """Right answers, of one task, length and depth where they are given."""
        picked = [item.right for item in self.picked(task, length) if depth is None or item.depth == depth]
        return Share(sum(picked), len(picked))

    def picked(self, task: str | None = None, length: int | None = None) -> list[Answer]:
        """Answers of a task and a length, of all where they are not given."""
        return [item for item in self.answers if task in {None, item.task} and length in {None, item.length}]


def mean(values: Sequence[float]) -> float:
    """The mean; not a number where there is none."""
    return sum(values) / len(values) if values else float("nan")


def plain(item: Any) -> dict[str, Any]:
    """The fields of a record, for JSON."""
    return dict(vars(item))
