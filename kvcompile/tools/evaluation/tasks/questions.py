"""Tasks by name, and their questions: the seven kinds of RULER, and tinylm's counts of lines.

    needle       one key-value line                       multikey     many similar keys, one asked
    multivalue   a key with several values, all asked     multiquery   several keys asked in one question
    variable     a chain of assignments followed back     common       the words that are listed most often
    frequent     codes by a zeta distribution, the most frequent        counts       how many lines mark a word
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from kvcompile.tools.evaluation.tasks.plans import (
    TaskPlan,
    common_words_plan,
    counting_plan,
    frequent_words_plan,
    multiquery_plan,
    multivalue_plan,
    needle_plan,
    tracking_plan,
)
from kvcompile.tools.evaluation.tasks.planting import BYTES, Filler, Units, Writing, planted


@dataclass(frozen=True)
class Example:
    """One question: `prompt_bytes` ends where `answer_bytes` (with its line break) begins.

    `depth`: position in the prompt of the first statement asked about (0 start, 1 end).
    """

    task: str
    prompt_bytes: bytes
    answer_bytes: bytes
    depth: float


@dataclass(frozen=True)
class Posed(Generic[Units]):
    """One question with its prompt in units (bytes or token ids), its answer as bytes with a line break, and the asked statement's depth.

    ``depth``: where in the prompt the first asked statement is, from 0 (start) to 1 (end).
    """

    prompt: Units
    answer: bytes
    depth: float


@dataclass(frozen=True)
class Task:
    """A kind of question.

    ``plan``: returns a plan for a prompt of some bytes, with fewer statements if they do not fit.
    ``parts``: returns the items of an answer, which are scored one by one. ``ordered``: whether their order counts.
    """

    plan: Callable[..., TaskPlan]
    parts: Callable[[bytes], tuple[bytes, ...]]
    ordered: bool = True


def _needle(rng: random.Random, context: int) -> TaskPlan:
    return needle_plan(rng)


def _multikey(rng: random.Random, context: int, keys: int = 16) -> TaskPlan:
    return needle_plan(rng, max(2, min(keys, (context - 60) // 100)))


def _multivalue(rng: random.Random, context: int, lines: int = 12, values: int = 4) -> TaskPlan:
    fitting = max(2, min(lines, (context - 60) // 100))
    each = max(2, min(values, fitting // 3))
    return multivalue_plan(rng, fitting // each, each)


def _multiquery(rng: random.Random, context: int, keys: int = 16, asked: int = 3) -> TaskPlan:
    fitting = max(2, min(keys, (context - 110) // 100))
    return multiquery_plan(rng, fitting, min(asked, fitting))


def _variable(rng: random.Random, context: int, chains: int = 4, hops: int = 2) -> TaskPlan:
    return tracking_plan(rng, max(1, min(chains, (context - 60) // (40 * (hops + 1)))), hops)


def _counts(rng: random.Random, context: int, words: int = 3, most: int = 8) -> TaskPlan:
    return counting_plan(rng, words, max(1, min(most, (context - 60) // (30 * words))))


def _common(rng: random.Random, context: int, few: int = 3, words: int = 120) -> TaskPlan:
    listed = max(4, min(words, (context - 100) // 24))
    fitting = max(1, min(few, listed // 8))
    times = max(3, min(10, listed // (2 * fitting)))
    return common_words_plan(rng, fitting, times, max(1, listed - fitting * times))


def _frequent(rng: random.Random, context: int, top: int = 3, words: int = 120, alpha: float = 2.0) -> TaskPlan:
    return frequent_words_plan(rng, top, max(6, min(words, (context - 100) // 24)), alpha)


def _whole(answer: bytes) -> tuple[bytes, ...]:
    return (answer.strip(),)


def _listed(answer: bytes) -> tuple[bytes, ...]:
    return tuple(answer.strip().split(b", "))


def _stated(answer: bytes) -> tuple[bytes, ...]:
    return tuple(item.rpartition(b" is ")[2] for item in _listed(answer))


def _chained(answer: bytes) -> tuple[bytes, ...]:
    return tuple(answer.strip().split(b" = "))


TASKS: dict[str, Task] = {
    "needle": Task(_needle, _whole),
    "multikey": Task(_multikey, _whole),
    "variable": Task(_variable, _chained),
    "counts": Task(_counts, _whole),
    "multivalue": Task(_multivalue, _listed),
    "multiquery": Task(_multiquery, _stated),
    "common": Task(_common, _listed, ordered=False),
    "frequent": Task(_frequent, _listed, ordered=False),
}

RULER = ("needle", "multikey", "multivalue", "multiquery", "variable", "common", "frequent")
"""The seven kinds that the sources report."""

KEYED = ("multikey", "multiquery")
"""Tasks whose plans take the number of keys that share a half."""


def posed(
    task: str, number: int, length: int, writing: Writing[Units], filler: Sequence[int] | np.ndarray, *, seed: int = 0,
    depth: float | None = None, room: int | None = None, **options: Any,
) -> Posed[Units]:
    """Return question ``number`` of a task, with a prompt of exactly ``length`` units.

    Equal arguments give equal questions on every machine; another depth moves the same statements.
    ``room``: bytes of a prompt that statements may fill (None: ``length``). ``depth``, ``options``: as in ``plant`` and the task's plan.
    """
    rng = random.Random(f"{task}:{seed}:{length}:{number}")
    plan = TASKS[task].plan(rng, length if room is None else room, **options)
    ask, answer = plan.questions[0]
    question = writing.write(ask)
    body, where = planted(writing, rng, plan, filler, length - len(question), depth)
    return Posed(writing.join((body, question)), answer, where * (length - len(question)) / length)


def examples(
    task: str, count: int, context: int, filler: Filler, *, seed: int = 0, depth: float | None = None, **options: Any
) -> list[Example]:
    """Return `count` questions of a task (a key of TASKS), all with prompts of `context` bytes; `options` are those of the task's plan.

    Equal arguments give equal questions on every machine.
    """
    made = (posed(task, number, context, BYTES, filler, seed=seed, depth=depth, **options) for number in range(count))
    return [Example(task, item.prompt, item.answer, item.depth) for item in made]
