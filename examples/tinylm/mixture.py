"""The training mixture: real text and retrieval episodes, as endless batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tinylm import codec, tasks
from tinylm.corpus import Corpus

ANSWER_WEIGHT = 10
SHORTEST_EPISODE = 160
# Keys of an episode that only differ in halves which others have too: 16 KB hold as many as are hard to tell apart.
MOST_KEYS = 128
KINDS = 9


@dataclass(frozen=True)
class Mixture:
    """Shares of the training sequences; the rest of 1 is left to the other choice."""

    text: float = 0.4
    prose: float = 0.15
    whole_episode: float = 0.5
    # Shares of needle, multi-key, variable, count, multi-value, multi-query, common-word and
    # frequent-word episodes, and of two plans in one.
    plans: tuple[float, ...] = (0.1, 0.2, 0.15, 0.1, 0.1, 0.1, 0.08, 0.07, 0.1)


def _merge(rng: random.Random, one: tasks.TaskPlan, two: tasks.TaskPlan) -> tasks.TaskPlan:
    questions = [*one.questions, *two.questions]
    rng.shuffle(questions)
    return tasks.TaskPlan(one.groups + two.groups, tuple(questions))


def _plan(rng: random.Random, kind: int, length: int) -> tasks.TaskPlan:
    """A random plan of a kind, of a size that fits well in `length` bytes."""
    if kind == 0:
        keys = rng.randint(1, max(1, min(4, length // 150)))
        return tasks.needle_plan(rng, keys, min(keys, 3), words=0.3)
    if kind == 1:
        keys = rng.randint(2, max(2, min(MOST_KEYS, length // 100)))
        return tasks.needle_plan(rng, keys, min(keys, rng.randint(1, 12)), words=0.2)
    if kind == 2:
        hops = rng.randint(1, 4 if length > 600 else 2)
        chains = rng.randint(1, max(1, min(8, length // (50 * (hops + 1)))))
        return tasks.tracking_plan(rng, chains, hops, min(chains, rng.randint(1, 6)))
    if kind == 3:
        words = rng.randint(1, 4 if length > 600 else 2)
        most = max(1, min(8, length // (40 * words)))
        return tasks.counting_plan(rng, words, most, words)
    if kind == 4:
        values = rng.randint(2, 4)
        keys = rng.randint(1, max(1, min(12, length // (100 * values))))
        return tasks.multivalue_plan(rng, keys, values, min(keys, rng.randint(1, 4)), words=0.2)
    if kind == 5:
        keys = rng.randint(2, max(2, min(MOST_KEYS, length // 110)))
        asked = min(keys, rng.randint(2, 4))
        return tasks.multiquery_plan(rng, keys, asked, rng.randint(1, max(1, min(4, keys // asked))), words=0.2)
    if kind == 6:
        listed = rng.randint(4, max(4, min(120, length // 24)))
        few = rng.randint(1, max(1, min(3, listed // 8)))
        times = rng.randint(2, max(2, min(10, listed // (2 * few))))
        return tasks.common_words_plan(rng, few, times, max(1, listed - few * times))
    if kind == 7:
        return tasks.frequent_words_plan(rng, rng.randint(1, 3), rng.randint(6, max(6, min(120, length // 24))))
    one, two = rng.sample(range(KINDS - 1), 2)
    return _merge(rng, _plan(rng, one, length // 2), _plan(rng, two, length // 2))


def episode(
    rng: random.Random, filler: tasks.Filler, length: int, shares: tuple[float, ...]
) -> tuple[bytes, np.ndarray]:
    """A text of `length` bytes that ends in answered questions, and loss weights (length,)."""
    plan = _plan(rng, rng.choices(range(len(shares)), shares)[0], length)
    if plan.planted_bytes + max(len(ask) + len(answer) for ask, answer in plan.questions) > length:
        plan = tasks.needle_plan(rng)
    kept: list[tuple[bytes, bytes]] = []
    room = length - plan.planted_bytes
    for ask, answer in plan.questions:
        if len(ask) + len(answer) < room:
            kept.append((ask, answer))
            room -= len(ask) + len(answer)
    tail = sum(len(ask) + len(answer) for ask, answer in kept)
    text, _ = tasks.plant(rng, plan, filler, length - tail)
    weights = np.ones(length, dtype=np.uint8)
    parts, at = [text], len(text)
    for ask, answer in kept:
        parts += (ask, answer)
        at += len(ask) + len(answer)
        weights[at - len(answer) : at] = ANSWER_WEIGHT
    return b"".join(parts), weights


def sequence(
    rng: random.Random, corpus: Corpus, length: int, mixture: Mixture
) -> tuple[bytes, np.ndarray]:
    """One training text of `length` bytes and its loss weights (length,).

    Episodes fill the sequence, share it with a second one, or are followed by plain text, so
    that every distance between a statement and its question is met.
    """

    def source() -> np.ndarray:
        plenty = len(corpus.prose) > length and rng.random() < mixture.prose
        return corpus.prose if plenty else corpus.python

    if rng.random() < mixture.text:
        return tasks.cut(rng, source(), length), np.ones(length, dtype=np.uint8)
    if length < 2 * SHORTEST_EPISODE or rng.random() < mixture.whole_episode:
        return episode(rng, source(), length, mixture.plans)
    split = rng.randint(SHORTEST_EPISODE, length - SHORTEST_EPISODE)
    head, head_weights = episode(rng, source(), split, mixture.plans)
    if rng.random() < 0.6:
        tail, tail_weights = episode(rng, source(), length - split, mixture.plans)
    else:
        tail = tasks.cut(rng, source(), length - split)
        tail_weights = np.ones(length - split, dtype=np.uint8)
    return head + tail, np.concatenate((head_weights, tail_weights))


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of (ids (B, T + 1) int16, weights (B, T) uint8), other for each worker.

    The ids start with the start token; position t predicts id t + 1 with weight t.
    """

    def __init__(
        self, corpus: Corpus, rows: int, length: int, seed: int, mixture: Mixture | None = None
    ) -> None:
        self.corpus, self.rows, self.length, self.seed = corpus, rows, length, seed
        self.mixture = mixture or Mixture()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}:{self.length}:{worker.id if worker else 0}")
        while True:
            ids = np.empty((self.rows, self.length + 1), dtype=np.int16)
            weights = np.empty((self.rows, self.length), dtype=np.uint8)
            ids[:, 0] = codec.BOS
            for row in range(self.rows):
                text, weights[row] = sequence(rng, self.corpus, self.length, self.mixture)
                ids[row, 1:] = np.frombuffer(text, dtype=np.uint8)
            yield torch.from_numpy(ids), torch.from_numpy(weights)
