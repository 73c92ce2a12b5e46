"""Subject: a model for evaluation with its way of writing text as ids, real text for prompts, and empty caches.

Prompts of tinylm are bytes after a start token; prompts of other models are ids of their tokenizer. The same code builds the questions of
both: ``posed`` in ``tasks``, through the ``writing`` of a subject.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcompile.errors import BadEvaluation
from kvcompile.tools.evaluation.tasks import TASKS, Writing, posed

SAMPLE = b"\n# Note: the number of bafi-dulok is 1234567\n"
"""A statement from which the number of bytes per token is estimated."""
TOKEN_SNAP = 48
"""Distance in tokens after a drawn offset within which a line break is looked for."""


class AnswerRule(enum.Enum):
    """The rule by which an answer counts as right.

    LINE: its first line, which must end with a line break, equals the expected line (its parts may be in any order if the task has none).
    PARTS, as in RULER: the answer contains all parts of the expected line, in upper or lower case.
    """

    LINE = "line"
    PARTS = "parts"

    def judge(self, task: str, expected: str, said: str) -> tuple[bool, float]:
        """Return (whether ``said`` is right, the share of ``expected``'s parts that ``said`` contains, in upper or lower case).

        By LINE, parts count only in the first line.
        """
        kind = TASKS[task]
        parts = [part.decode() for part in kind.parts(expected.encode())]
        line, ended, _ = said.partition("\n")
        within = (said if self is AnswerRule.PARTS else line).lower()
        share = sum(part.lower() in within for part in parts) / len(parts)
        if self is AnswerRule.PARTS:
            return share == 1.0, share
        same = line == expected if kind.ordered else sorted(line.split(", ")) == sorted(parts)
        return same and bool(ended), share


@dataclass(frozen=True)
class Question:
    """One question for a model: a name that identifies it fully, the prompt's ids with start tokens, and the expected line."""

    name: str
    task: str
    length: int
    depth: float
    prompt: tuple[int, ...]
    expected: str
    answer_tokens: int


@dataclass(frozen=True)
class Span:
    """Units ``start`` to ``stop`` of a filler, all of one ``kind`` of text."""

    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class Subject:
    """A model and everything needed to evaluate it.

    ``filler``: real text in units of ``writing``. ``start``: ids before every prompt. ``text``: (ids) -> text. ``cache``: (number of
    tokens) -> an empty cache. ``positions``: the most tokens that the model supports, None if its configuration does not state it.
    ``trained``: tasks whose wording the model was trained on. ``spans``: kinds of text in the filler; none where it is of one kind.
    """

    name: str
    model: Any
    device: str
    writing: Writing[Any]
    filler: Sequence[int] | np.ndarray
    start: tuple[int, ...]
    text: Callable[[Sequence[int]], str]
    rule: AnswerRule
    cache: Callable[[int], Any]
    positions: int | None = None
    trained: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def unit(self) -> str:
        """The unit of lengths: bytes or tokens."""
        return self.writing.unit

    @property
    def dtype(self) -> str:
        """Name of the dtype of the model's weights."""
        return str(next(iter(self.model.parameters())).dtype).removeprefix("torch.")

    def room(self, length: int) -> int:
        """Return the number of bytes that a prompt of ``length`` units has room for, estimated from ``SAMPLE``."""
        return int(length * len(SAMPLE) / len(self.writing.write(SAMPLE)))

    def questions(
        self, task: str, count: int, length: int, depths: Sequence[float | None], seed: int, **options: int
    ) -> list[Question]:
        """Return ``count`` questions of a task with prompts of ``length`` units, at ``depths`` in turn (None: drawn).

        ``options``: further arguments of the task's plan.
        """
        spelled = "".join(f"/{name}={value}" for name, value in options.items())
        made = []
        for number in range(count):
            depth = depths[number % len(depths)]
            item = posed(task, number, length, self.writing, self.filler, seed=seed, depth=depth, room=self.room(length), **options)
            name = f"{task}/{self.unit}={length}/depth={'drawn' if depth is None else f'{depth:g}'}/seed={seed}{spelled}/{number}"
            answer = len(self.writing.write(item.answer)) + (0 if self.rule is AnswerRule.LINE else 8)
            asked = round(item.depth, 1) if depth is None else depth
            made.append(Question(name, task, length, asked, (*self.start, *item.prompt), item.answer.decode().strip(), answer))
        return made

    def texts(self, length: int, tail: int, rows: int) -> torch.Tensor:
        """Return ids [rows, start + length + tail] of parts of the text: its kinds in turn, spread evenly over each kind.

        Raises BadEvaluation if the text is shorter than ``length + tail`` units.
        """
        whole, spans = length + tail, self._long_spans(length + tail)
        parts = []
        for row in range(rows):
            span = spans[row % len(spans)]
            # Texts of this kind: every len(spans)-th row.
            stride = (span.stop - span.start - whole) // len(range(row % len(spans), rows, len(spans)))
            first = span.start + row // len(spans) * stride
            parts.append([*self.start, *(int(item) for item in self.filler[first : first + whole])])
        return torch.tensor(parts, device=self.device)

    def kinds(self, length: int, tail: int, rows: int) -> tuple[str, ...]:
        """Return the kind of each row of ``texts`` for the same arguments. Raises BadEvaluation if the text is too short."""
        spans = self._long_spans(length + tail)
        return tuple(spans[row % len(spans)].kind for row in range(rows))

    def _long_spans(self, whole: int) -> list[Span]:
        """Return the spans of at least ``whole`` units, or one over the whole filler if none is that long.

        Raises BadEvaluation if the filler is too short.
        """
        found = [span for span in self.spans if span.stop - span.start >= whole]
        if not found and len(self.filler) < whole:
            raise BadEvaluation(
                setting="the text", expected=f"{whole:,} {self.unit} long at least", found=f"{len(self.filler):,}",
                todo="pass --data with more text, or smaller --lengths",
            )
        return found or [Span("text", 0, len(self.filler))]

    def count_bytes(self, row: Sequence[int], tail: int) -> int:
        """Return the number of UTF-8 bytes of the last ``tail`` ids of a row."""
        return max(1, len(self.text(row).encode()) - len(self.text(row[:-tail]).encode()))


class TokenWriting:
    """Prompts as token ids; ``encode``: (text) -> ids without special tokens; ``text``: (ids) -> text."""

    unit = "tokens"

    def __init__(self, encode: Callable[[str], Sequence[int]], text: Callable[[Sequence[int]], str]) -> None:
        self.encode, self.text = encode, text
        self.breaks: dict[int, bool] = {}

    def write(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of a text without trailing spaces: tokenizers put a space at the start of the next word."""
        return tuple(self.encode(text.decode().rstrip(" ")))

    def take(self, filler: Sequence[int] | np.ndarray, start: int, stop: int) -> tuple[int, ...]:
        """Return the ids ``filler[start:stop]``."""
        return tuple(int(item) for item in filler[start:stop])

    def join(self, pieces: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the pieces' ids in one tuple."""
        return tuple(item for piece in pieces for item in piece)

    def place(self, raw: tuple[int, ...], offset: int) -> int:
        """Return the index after the first token with a line break among the ``TOKEN_SNAP`` tokens from ``offset`` on; else ``offset``."""
        for at in range(offset, min(offset + TOKEN_SNAP, len(raw))):
            if raw[at] not in self.breaks:
                self.breaks[raw[at]] = "\n" in self.text([raw[at]])
            if self.breaks[raw[at]]:
                return at + 1
        return offset
