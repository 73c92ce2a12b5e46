"""Plans: the lines that a prompt hides and the questions about them, drawn at random.

Needles, traces and counts have the wording that tinylm was trained on; a test checks it byte for byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

NOUNS = (b"number", b"code", b"address", b"value")
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
WORDS_A_LINE = 6


@dataclass(frozen=True)
class TaskPlan:
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
    """Return a made-up pronounceable word: ``syllables`` consonant-vowel pairs, sometimes with a final consonant."""
    letters = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables)]
    if rng.random() < 0.5:
        letters.append(rng.choice(CONSONANTS))
    return "".join(letters).encode()


def digits(rng: random.Random) -> bytes:
    """Return a number of five to seven digits."""
    return str(rng.randrange(10_000, 10_000_000)).encode()


def code(rng: random.Random) -> bytes:
    """Return a code of four characters: two pairs of a consonant and a digit, as in k4t9."""
    return "".join(rng.choice(CONSONANTS) + rng.choice("0123456789") for _ in range(2)).encode()


def _distinct(rng: random.Random, count: int, make: Callable[[random.Random], bytes]) -> list[bytes]:
    found: dict[bytes, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def _keys(rng: random.Random, count: int) -> list[bytes]:
    """Return at least ``count`` keys of two words; several keys share a word, so that no single word identifies a line."""
    side = ceil(sqrt(count)) if count > 1 else 1
    first, second = _distinct(rng, side, word), _distinct(rng, side, word)
    pairs = [a + b"-" + b for a in first for b in second]
    rng.shuffle(pairs)
    return pairs


def _value(rng: random.Random, words: float) -> bytes:
    """Return a value to recall: a number, or with probability ``words`` a made-up word."""
    return word(rng, 3) if rng.random() < words else digits(rng)


def _note(noun: bytes, key: bytes, value: bytes) -> bytes:
    return b"# Note: the %s of %s is %s" % (noun, key, value)


def needle_plan(rng: random.Random, keys: int = 1, questions: int = 1, words: float = 0.0) -> TaskPlan:
    """Return a plan of ``keys`` key-value lines, the first ``questions`` of which are asked.

    ``words``: share of values that are made-up words rather than numbers.
    """
    pairs = _keys(rng, keys)
    noun = rng.choice(NOUNS)
    groups, asked = [], []
    for key in pairs[:keys]:
        value = _value(rng, words)
        groups.append((_note(noun, key, value),))
        asked.append((b"\n# Recall: the %s of %s is " % (noun, key), value + b"\n"))
    return TaskPlan(tuple(groups), tuple(asked[:questions]))


def multivalue_plan(rng: random.Random, keys: int = 3, values: int = 3, questions: int = 1, words: float = 0.0) -> TaskPlan:
    """Return a plan of ``keys`` keys with ``values`` lines each; the first ``questions`` keys are asked for all their values, in order."""
    pairs = _keys(rng, keys)
    noun = rng.choice(NOUNS)
    groups, asked = [], []
    for key in pairs[:keys]:
        said = _distinct(rng, values, lambda source: _value(source, words))
        groups.append(tuple(_note(noun, key, value) for value in said))
        asked.append((b"\n# Recall all %d: the %s of %s is " % (values, noun, key), b", ".join(said) + b"\n"))
    return TaskPlan(tuple(groups), tuple(asked[:questions]))


def multiquery_plan(rng: random.Random, keys: int = 8, asked: int = 3, questions: int = 1, words: float = 0.0) -> TaskPlan:
    """Return a plan of ``keys`` key-value lines; each of ``questions`` questions asks for ``asked`` other keys, which the answer names."""
    pairs = _keys(rng, keys)[:keys]
    noun = rng.choice(NOUNS)
    said = {key: _value(rng, words) for key in pairs}
    groups = tuple((_note(noun, key, value),) for key, value in said.items())
    rows = [pairs[at : at + asked] for at in range(0, questions * asked, asked)]
    return TaskPlan(groups, tuple(
        (
            b"\n# Recall each of %s: the %s of " % (b", ".join(row), noun),
            b", ".join(b"%s is %s" % (key, said[key]) for key in row) + b"\n",
        ) for row in rows if row
    ))


def tracking_plan(rng: random.Random, chains: int = 4, hops: int = 2, questions: int = 1) -> TaskPlan:
    """Return a plan of ``chains`` assignment chains (`a = 48213`, `b = a`, ...) of ``hops`` hops; ``questions`` ask from the last names.

    The answer follows the chain back to its number, as in `# Trace: c = b = a = 48213`.
    """
    names = _distinct(rng, chains * (hops + 1), word)
    groups, asked = [], []
    for chain in range(chains):
        links = [*names[chain * (hops + 1) : (chain + 1) * (hops + 1)], digits(rng)]
        groups.append(tuple(b"%s = %s" % (a, b) for a, b in zip(links[-2::-1], links[:0:-1], strict=True)))
        asked.append((b"\n# Trace: %s = " % links[0], b" = ".join(links[1:]) + b"\n"))
    return TaskPlan(tuple(groups), tuple(asked[:questions]))


def counting_plan(rng: random.Random, words: int = 3, most: int = 8, questions: int = 1) -> TaskPlan:
    """Return a plan of marked words, each on one to `most` lines; the questions ask how many lines mark a word."""
    groups, asked = [], []
    for name in _distinct(rng, words, word):
        times = rng.randint(1, most)
        groups.append((b"# Seen: " + name,) * times)
        asked.append((b"\n# Count of %s: " % name, b"%d\n" % times))
    return TaskPlan(tuple(groups), tuple(asked[:questions]))


def _listed(marker: bytes, items: list[bytes]) -> tuple[bytes, ...]:
    """Return lines that list ``items``, a few words on each line after ``marker``."""
    rows = (items[at : at + WORDS_A_LINE] for at in range(0, len(items), WORDS_A_LINE))
    return tuple(b"# %s: %s" % (marker, b", ".join(row)) for row in rows)


def common_words_plan(rng: random.Random, few: int = 3, times: int = 8, others: int = 24) -> TaskPlan:
    """Return a plan of listed words: ``few`` of them ``times`` times each, ``others`` once; asked for the few, in order of appearance."""
    names = _distinct(rng, few + others, word)
    common = set(names[:few])
    bag = [*names[:few] * times, *names[few:]]
    rng.shuffle(bag)
    answer = list(dict.fromkeys(name for name in bag if name in common))
    return TaskPlan((_listed(b"Words", bag),), ((b"\n# The %d most common words: " % few, b", ".join(answer) + b"\n"),))


def zeta_counts(total: int, alpha: float) -> list[int]:
    """Return how often each word occurs among ``total``: in proportion to rank ** -alpha, and at least once."""
    norm = sum(rank ** -alpha for rank in range(1, total + 1))
    counts: list[int] = []
    while sum(counts) < total:
        share = round(total * (len(counts) + 1) ** -alpha / norm)
        counts.append(min(max(1, share), total - sum(counts)))
    return counts


def frequent_words_plan(rng: random.Random, top: int = 3, total: int = 60, alpha: float = 2.0) -> TaskPlan:
    """Return a plan of ``total`` listed codes with a zeta distribution, asked for the ``top`` most frequent, most frequent first.

    ``alpha``: the distribution's exponent. Fewer are asked if a rank is not more frequent than the next.
    """
    counts = zeta_counts(total, alpha)
    clear = next((rank for rank, (more, less) in enumerate(zip(counts, [*counts[1:], 0], strict=True), 1) if more == less), len(counts))
    top = max(1, min(top, clear - 1))
    names = _distinct(rng, len(counts), code)
    bag = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(bag)
    return TaskPlan((_listed(b"Coded", bag),), ((b"\n# The %d most frequent codes: " % top, b", ".join(names[:top]) + b"\n"),))
