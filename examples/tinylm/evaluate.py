"""Quality figures of tinylm, by plain forward passes and through a key-value cache.

Every task figure is a Score of right answers out of trials. A model is any callable with the
interface of a Transformers causal language model: `model(input_ids=..., past_key_values=...,
use_cache=...).logits`, of shape (B, T, V).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    # The folder of examples, and the repository: questions are built by kvcompile.tools.evaluation.
    sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

from kvcompile.tools.evaluation.statistics import wilson
from tinylm import codec, corpus, tasks

Model = Callable[..., Any]
MakeCache = Callable[[], Any]


@dataclass(frozen=True)
class Score:
    """Which trials were answered exactly right, in the order of the examples."""

    outcomes: tuple[bool, ...]

    @property
    def hits(self) -> int:
        """Number of right answers."""
        return sum(self.outcomes)

    @property
    def trials(self) -> int:
        """Number of questions."""
        return len(self.outcomes)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.hits / max(1, self.trials)

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """Wilson's confidence interval of the accuracy (95% unless told)."""
        return wilson(self.hits, self.trials, z)


def device_of(model: Model) -> torch.device:
    """The device of a model's parameters; the CPU where it shows none."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if parameters else None
    return first.device if first is not None else torch.device("cpu")


def _bits(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Total bits of targets (B, T) under logits (B, T, V)."""
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    return losses.item() / log(2)


@torch.inference_mode()
def bits_per_byte(
    model: Model, ids: torch.Tensor, *, window: int = 4096, batch_size: int = 4
) -> float:
    """Bits per byte of a text, ids (T,), in windows that each begin with a start token."""
    device = device_of(model)
    ids = ids[ids < codec.BYTES].to(device)
    whole = ids[: len(ids) // window * window].view(-1, window)
    batches = [*whole.split(batch_size)] if len(whole) else []
    if len(ids) % window:
        batches.append(ids[whole.numel() :][None])
    total = 0.0
    for targets in batches:
        start = targets.new_full((len(targets), 1), codec.BOS)
        inputs = torch.cat((start, targets[:, :-1]), dim=1)
        total += _bits(model(input_ids=inputs, use_cache=False).logits, targets)
    return total / len(ids)


def _batches(
    questions: Sequence[tasks.Example], batch_size: int
) -> Iterator[Sequence[tasks.Example]]:
    """Runs of questions with prompts of one length, at most `batch_size` at a time."""
    for _, run in groupby(questions, key=lambda example: len(example.prompt_bytes)):
        same = list(run)
        for start in range(0, len(same), batch_size):
            yield same[start : start + batch_size]


def _prompts(batch: Sequence[tasks.Example], device: torch.device) -> torch.Tensor:
    rows = [codec.encode(example.prompt_bytes) for example in batch]
    return torch.tensor(rows, dtype=torch.long, device=device)


def _answers(batch: Sequence[tasks.Example], device: torch.device) -> torch.Tensor:
    """Answer ids of shape (B, A), padded on the right."""
    longest = max(len(example.answer_bytes) for example in batch)
    rows = [
        [*example.answer_bytes, *[codec.PAD] * (longest - len(example.answer_bytes))]
        for example in batch
    ]
    return torch.tensor(rows, dtype=torch.long, device=device)


@torch.inference_mode()
def answers_by_forward(
    model: Model, questions: Sequence[tasks.Example], *, batch_size: int = 8
) -> Score:
    """Questions answered exactly, by one forward pass over prompt and answer.

    Every answer byte being the likeliest after the true ones before it is the same as the
    greedy continuation being the answer. Nothing goes through a cache here.
    """
    device = device_of(model)
    outcomes: list[bool] = []
    for batch in _batches(questions, batch_size):
        prompts, answers = _prompts(batch, device), _answers(batch, device)
        # Padding stands on the right, where causal attention hides it from every answer.
        logits = model(input_ids=torch.cat((prompts, answers), 1), use_cache=False).logits
        likeliest = logits[:, prompts.shape[1] - 1 : -1].argmax(-1)
        outcomes += ((likeliest == answers) | (answers == codec.PAD)).all(1).tolist()
    return Score(tuple(outcomes))


@torch.inference_mode()
def answers_by_decoding(
    model: Model,
    questions: Sequence[tasks.Example],
    make_cache: MakeCache,
    *,
    batch_size: int = 1,
) -> Score:
    """Questions answered exactly, by prefilling a fresh cache and decoding greedily through it.

    The model's own bytes are fed back one at a time, as in generation; `make_cache()` gives
    the `past_key_values` object of each batch.
    """
    device = device_of(model)
    outcomes: list[bool] = []
    for batch in _batches(questions, batch_size):
        prompts, answers = _prompts(batch, device), _answers(batch, device)
        cache, inputs, said = make_cache(), prompts, []
        for _ in range(answers.shape[1]):
            logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits
            inputs = logits[:, -1:].argmax(-1)
            said.append(inputs)
        right = (torch.cat(said, 1) == answers) | (answers == codec.PAD)
        outcomes += right.all(1).tolist()
    return Score(tuple(outcomes))


@torch.inference_mode()
def decode_loss(
    model: Model, ids: torch.Tensor, make_cache: MakeCache, prefill: int, *, chunk: int = 1
) -> float:
    """Bits per byte of the text after `prefill` tokens, fed through a cache in chunks.

    `ids` is (T,) or (B, T), with the start token in place. A chunk of 1 is a decode step.
    """
    ids = (ids[None] if ids.dim() == 1 else ids).to(device_of(model))
    if not 0 < prefill < ids.shape[1]:
        raise ValueError(f"prefill must lie in 1..{ids.shape[1] - 1}, not {prefill}")
    cache = make_cache()
    total, at = 0.0, 0
    while at < ids.shape[1] - 1:
        end = prefill if at == 0 else min(at + chunk, ids.shape[1] - 1)
        inputs = ids[:, at:end]
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits
        # Only the prefill's last position predicts a byte of the tail.
        logits = logits[:, -1:] if at == 0 else logits
        total += _bits(logits, ids[:, end - logits.shape[1] + 1 : end + 1])
        at = end
    return total / (ids.shape[0] * (ids.shape[1] - prefill))


def task_score(
    model: Model,
    task: str,
    count: int = 100,
    context: int = 4000,
    *,
    seed: int = 0,
    make_cache: MakeCache | None = None,
    batch_size: int = 8,
    **options: object,
) -> Score:
    """Score of `count` questions of a task in held-out filler.

    By a plain forward pass, or through caches where `make_cache` is given; `options` go to
    the task (depth, keys, chains, hops, words, most).
    """
    filler = corpus.heldout_text()
    questions = tasks.examples(task, count, context, filler, seed=seed, **options)
    if make_cache is None:
        return answers_by_forward(model, questions, batch_size=batch_size)
    return answers_by_decoding(model, questions, make_cache, batch_size=batch_size)


def needle_accuracy(model: Model, count: int = 100, context: int = 4000, **options: Any) -> Score:
    """Score of single needles; options as in `task_score`."""
    return task_score(model, "needle", count, context, **options)


def multikey_accuracy(model: Model, count: int = 100, context: int = 4000, **options: Any) -> Score:
    """Score of multi-key needles, 16 keys unless told; options as in `task_score`."""
    return task_score(model, "multikey", count, context, **options)


def variable_tracking(model: Model, count: int = 100, context: int = 4000, **options: Any) -> Score:
    """Score of assignment chains traced back whole; options as in `task_score`."""
    return task_score(model, "variable", count, context, **options)


def word_counts(model: Model, count: int = 100, context: int = 4000, **options: Any) -> Score:
    """Score of counts of marked lines, 1 to 8; options as in `task_score`."""
    return task_score(model, "counts", count, context, **options)


def summary(
    model: Model, contexts: Sequence[int], count: int, *, seed: int = 0, batch_size: int = 8
) -> dict[str, Any]:
    """Bits per byte of the held-out text and hits of every task at every context."""
    ids = codec.encode_tensor(corpus.heldout_text(), bos=False)
    figures: dict[str, Any] = {"heldout_bits_per_byte": bits_per_byte(model, ids)}
    for context in contexts:
        for task in tasks.TASKS:
            score = task_score(model, task, count, context, seed=seed, batch_size=batch_size)
            figures[f"{task}@{context}"] = [score.hits, score.trials]
    return figures


def main() -> None:
    """Prints the quality figures of a model folder, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default=str(HERE))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4000])
    parser.add_argument("--count", type=int, default=50, help="questions a task and context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(arguments.model).to(arguments.device).eval()
    figures = summary(model, arguments.contexts, arguments.count, seed=arguments.seed)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if isinstance(value, list):
            low, high = Score((True,) * value[0] + (False,) * (value[1] - value[0])).interval()
            print(f"{name:16} {value[0]:4} of {value[1]}  (95%: {low:.1%} to {high:.1%})")
        else:
            print(f"{name:16} {value:.4f}")


if __name__ == "__main__":
    main()
