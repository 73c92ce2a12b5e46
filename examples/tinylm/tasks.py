"""Synthetic retrieval tasks in real filler text, deterministic from a seed.

Training and evaluation build their questions with the same code. Statements are planted on
lines of their own at uniform depths of the filler, and the question stands at the very end:
the model answers by copying (needles), by following a chain of copies (variable tracking) or
by counting lines (word counts).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

Filler = bytes | np.ndarray
"""Real text to hide statements in: bytes, or a uint8 array of shape (N,)."""

# How far past the drawn place a line break is looked for, to plant between whole lines.
SNAP = 160
NOUNS = (b"number", b"code", b"address", b"value")
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


@dataclass(frozen=True)
class Example:
    """One question: `prompt_bytes` ends where `answer_bytes` (with its line break) begins.

    `depth` is where in the prompt the first statement that matters stands (0 start, 1 end).
    """

    task: str
    prompt_bytes: bytes
    answer_bytes: bytes
    depth: float


@dataclass(frozen=True)
class Plan:
    """Statements to plant and the questions about them.

    Each group's lines keep their order in the text. The first question is about group 0.
    """

    groups: tuple[tuple[bytes, ...], ...]
    questions: tuple[tuple[bytes, bytes], ...]

    @property
    def planted_bytes(self) -> int:
        """Bytes that the planted lines add to the filler."""
        return sum(len(line) + 2 for group in self.groups for line in group)


def word(rng: random.Random, syllables: int = 2) -> bytes:
    """A made-up word that can be said aloud: a few consonant-vowel pairs, maybe a final."""
    letters = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables)]
    if rng.random() < 0.5:
        letters.append(rng.choice(CONSONANTS))
    return "".join(letters).encode()


def digits(rng: random.Random) -> bytes:
    """A number of five to seven digits."""
    return str(rng.randrange(10_000, 10_000_000)).encode()


def _distinct(
    rng: random.Random, count: int, make: Callable[[random.Random], bytes]
) -> list[bytes]:
    found: dict[bytes, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def needle_plan(rng: random.Random, keys: int = 1, questions: int = 1, words: float = 0.0) -> Plan:
    """A plan of `keys` key-value lines, the first `questions` of which are asked.

    Keys of several lines share their halves, so that no half alone finds the line. `words` is
    the share of values that are made-up words rather than numbers.
    """
    side = ceil(sqrt(keys)) if keys > 1 else 1
    first, second = _distinct(rng, side, word), _distinct(rng, side, word)
    pairs = [a + b"-" + b for a in first for b in second]
    rng.shuffle(pairs)
    noun = rng.choice(NOUNS)
    groups, asked = [], []
    for key in pairs[:keys]:
        value = word(rng, 3) if rng.random() < words else digits(rng)
        groups.append((b"# Note: the %s of %s is %s" % (noun, key, value),))
        asked.append((b"\n# Recall: the %s of %s is " % (noun, key), value + b"\n"))
    return Plan(tuple(groups), tuple(asked[:questions]))


def tracking_plan(rng: random.Random, chains: int = 4, hops: int = 2, questions: int = 1) -> Plan:
    """A plan of assignment chains (`a = 48213`, `b = a`, ...), asked from their last names.

    The answer walks the chain back to its number, as in `# Trace: c = b = a = 48213`.
    """
    names = _distinct(rng, chains * (hops + 1), word)
    groups, asked = [], []
    for chain in range(chains):
        links = [*names[chain * (hops + 1) : (chain + 1) * (hops + 1)], digits(rng)]
        groups.append(tuple(b"%s = %s" % (a, b) for a, b in zip(links[-2::-1], links[:0:-1])))
        asked.append((b"\n# Trace: %s = " % links[0], b" = ".join(links[1:]) + b"\n"))
    return Plan(tuple(groups), tuple(asked[:questions]))


def counting_plan(rng: random.Random, words: int = 3, most: int = 8, questions: int = 1) -> Plan:
    """A plan of marked words, each on one to `most` lines, whose lines are to be counted."""
    groups, asked = [], []
    for name in _distinct(rng, words, word):
        times = rng.randint(1, most)
        groups.append((b"# Seen: " + name,) * times)
        asked.append((b"\n# Count of %s: " % name, b"%d\n" % times))
    return Plan(tuple(groups), tuple(asked[:questions]))


def cut(rng: random.Random, filler: Filler, length: int) -> bytes:
    """A random piece of `length` bytes of the filler, repeated where the filler is shorter."""
    start = rng.randrange(max(1, len(filler) - length + 1))
    piece = bytes(filler[start : start + length])
    while len(piece) < length:
        piece += bytes(filler[: length - len(piece)])
    return piece


def plant(
    rng: random.Random, plan: Plan, filler: Filler, length: int, depth: float | None = None
) -> tuple[bytes, float]:
    """Filler with the plan's lines in it, exactly `length` bytes, and group 0's first depth.

    Places are uniform over the text; `depth` pins the first line of group 0 instead.
    """
    room = length - plan.planted_bytes
    if room < 0:
        raise ValueError(f"{plan.planted_bytes} planted bytes do not fit in {length}")
    raw = cut(rng, filler, room)
    placed: list[tuple[int, int, bytes]] = []
    for number, group in enumerate(plan.groups):
        offsets = sorted(rng.randint(0, room) for _ in group)
        if number == 0 and depth is not None:
            offsets[0] = min(room, int(depth * room))
            offsets.sort()
        for offset, line in zip(offsets, group):
            end = raw.find(b"\n", offset, offset + SNAP)
            placed.append((offset if end < 0 else end, number, line))
    placed.sort(key=lambda item: item[0])
    pieces: list[bytes] = []
    done = used = 0
    first: int | None = None
    for offset, number, line in placed:
        pieces += (raw[done:offset], b"\n", line, b"\n")
        if number == 0 and first is None:
            first = offset + used
        done, used = offset, used + len(line) + 2
    pieces.append(raw[done:])
    return b"".join(pieces), (first or 0) / max(1, length)


def _example(
    task: str, rng: random.Random, plan: Plan, filler: Filler, context: int, depth: float | None
) -> Example:
    ask, answer = plan.questions[0]
    body, where = plant(rng, plan, filler, context - len(ask), depth)
    return Example(task, body + ask, answer, where * (context - len(ask)) / context)


def needle(rng: random.Random, filler: Filler, context: int, depth: float | None = None) -> Example:
    """A single-needle question whose prompt is exactly `context` bytes."""
    return _example("needle", rng, needle_plan(rng), filler, context, depth)


def multikey(
    rng: random.Random, filler: Filler, context: int, depth: float | None = None, keys: int = 16
) -> Example:
    """A multi-key needle question: many keys, one asked; fewer keys where they do not fit."""
    fitting = max(2, min(keys, (context - 60) // 100))
    return _example("multikey", rng, needle_plan(rng, fitting), filler, context, depth)


def variable_tracking(
    rng: random.Random,
    filler: Filler,
    context: int,
    depth: float | None = None,
    chains: int = 4,
    hops: int = 2,
) -> Example:
    """A variable-tracking question over assignment chains; fewer chains where they do not fit."""
    fitting = max(1, min(chains, (context - 60) // (40 * (hops + 1))))
    return _example("variable", rng, tracking_plan(rng, fitting, hops), filler, context, depth)


def word_counts(
    rng: random.Random,
    filler: Filler,
    context: int,
    depth: float | None = None,
    words: int = 3,
    most: int = 8,
) -> Example:
    """A word-count question: how many lines mark one of a few words."""
    fitting = max(1, min(most, (context - 60) // (30 * words)))
    return _example("counts", rng, counting_plan(rng, words, fitting), filler, context, depth)


TASKS: dict[str, Callable[..., Example]] = {
    "needle": needle,
    "multikey": multikey,
    "variable": variable_tracking,
    "counts": word_counts,
}


def examples(
    task: str, count: int, context: int, filler: Filler, *, seed: int = 0, **options: object
) -> list[Example]:
    """`count` questions of a task (a key of TASKS), all with prompts of `context` bytes.

    The same arguments give the same questions on every machine; `options` go to the task.
    """
    build = TASKS[task]
    return [
        build(random.Random(f"{task}:{seed}:{context}:{number}"), filler, context, **options)
        for number in range(count)
    ]
