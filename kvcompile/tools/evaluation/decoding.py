"""Decoding: prefills prompts into an empty cache, then decodes single tokens over it.

A prompt's last token is a step of its own: the graph of a prompt may attend in full precision, so its prediction says nothing about the
cache, and one-token answers would show no damage. All calls have one of two shapes, a prompt's and a step's, and run without gradients, so
a compiled model has one graph for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvcompile.tools.evaluation.subject import Question, Subject

Model = Callable[..., Any]


def last_only(model: Any) -> dict[str, int]:
    """Return the keyword arguments that make a model return logits of the last token only, {} if its forward has no such argument.

    Logits of all tokens of a prompt take much memory.
    """
    forward = getattr(model, "forward", model)
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}


@torch.no_grad()
def forced(model: Model, ids: torch.Tensor, prompt: int, cache: Any, options: dict[str, int]) -> Iterator[torch.Tensor]:
    """Yield logits [B, V] for every token after the first ``prompt`` of ids [B, T], decoding the true tokens before it."""
    prefill(model, ids[:, :prompt], cache, options)
    for at in range(prompt - 1, ids.shape[1] - 1):
        yield model(input_ids=packed(ids[:, at : at + 1]), past_key_values=cache, use_cache=True, **options).logits[:, -1]


def packed(part: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of ``part``: for a slice's strides Dynamo would compile another graph."""
    return part.clone(memory_format=torch.contiguous_format)


def prefill(model: Model, prompt: torch.Tensor, cache: Any, options: dict[str, int]) -> None:
    """Write all tokens of a prompt [B, P] except the last into an empty cache."""
    if prompt.shape[1] > 1:
        model(input_ids=packed(prompt[:, :-1]), past_key_values=cache, use_cache=True, **options)


@torch.no_grad()
def greedy(
    model: Model, prompts: torch.Tensor, count: int, cache: Any, options: dict[str, int], ended: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Return up to ``count`` greedily decoded ids for each of the prompts [B, P]; stop when ``ended`` holds for all rows."""
    said: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    prefill(model, prompts, cache, options)
    inputs = packed(prompts[:, -1:])
    for _ in range(count):
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, **options).logits
        inputs = logits[:, -1:].argmax(-1)
        for row, item in zip(said, inputs[:, 0].tolist(), strict=True):
            row.append(item)
        if all(map(ended, said)):
            break
    return said


def answers(
    model: Model, subject: Subject, questions: Sequence[Question], rows: int, capacity: int, options: dict[str, int],
    report: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Return the model's answers to questions with prompts of one length, ``rows`` at a time; the last batch repeats its last question."""
    found: list[str] = []
    for at in range(0, len(questions), rows):
        batch = list(questions[at : at + rows])
        filled = batch + batch[-1:] * (rows - len(batch))
        prompts = torch.tensor([item.prompt for item in filled], device=subject.device)
        count = max(item.answer_tokens for item in batch)
        said = greedy(model, prompts, count, subject.cache(capacity), options, lambda row: "\n" in subject.text(row).lstrip())
        found += [subject.text(row[: item.answer_tokens]) for item, row in zip(batch, said, strict=False)]
        report(len(batch))
    return found
