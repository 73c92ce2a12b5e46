"""Text as batches to learn from: sequences of one length behind a prefix that is context and no target (the source's Appendix A)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import BadBatch, FileUnfit
from kvcompile.files.declared import as_declared
from kvcompile.files.json_file import parsed

CHAT_PROMPT = "Continue the following text."
"""The user's message that plain text is the answer to, for models that were trained on chats."""


@dataclass(frozen=True)
class TokenEncoding:
    """How text becomes token ids, and the ids that stand in front of every sequence and are no targets."""

    encode: Callable[[str], Sequence[int]]
    prefix: tuple[int, ...] = ()


def documents(paths: Sequence[Path]) -> Iterator[str]:
    """The texts of files: a file whole, or the ``text`` of every line of a .jsonl; raises BadBatch where one cannot be read."""
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
            if path.suffix != ".jsonl":
                yield content
                continue
            # Other ends of lines than this one may stand inside a JSON text.
            for line in filter(str.strip, content.split("\n")):
                yield as_declared(str, parsed(line, dict[str, Any], path.name).get("text"), f"{path.name}.text")
        except (OSError, UnicodeDecodeError, FileUnfit) as error:
            found = f"{path}: {type(error).__name__}: {error}"
            raise BadBatch(expected="text in UTF-8, or lines of JSON with a text", found=found, todo="correct the file") from error


def sequences(texts: Iterator[str], tokens: TokenEncoding, length: int) -> list[list[int]]:
    """Runs of token ids of ``length`` less the prefix, documents one behind the other; what is left at the end is dropped."""
    room = length - len(tokens.prefix)
    if room < 2:
        raise BadBatch(expected=f"sequences longer than the prefix ({len(tokens.prefix)} tokens)", found=length, todo="raise the length")
    held: list[int] = []
    found = []
    for text in texts:
        held += tokens.encode(text)
        while len(held) >= room:
            found.append(held[:room])
            held = held[room:]
    return found


def split(runs: list[list[int]], validation: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """(training, validation) sequences, shuffled; raises BadBatch where there are too few."""
    if len(runs) <= validation:
        raise BadBatch(
            expected=f"more than {validation} sequences, of which as many are held out", found=f"{len(runs)} in these files",
            todo="pass more text, a smaller length or fewer for validation",
        )
    order = list(runs)
    random.Random(seed).shuffle(order)
    return order[validation:], order[:validation]


def batches(runs: Sequence[Sequence[int]], tokens: TokenEncoding, rows: int) -> list[dict[str, torch.Tensor]]:
    """Batches of ``rows`` sequences behind the prefix, whose tokens are no targets; all but the last have as many."""
    made = []
    for at in range(0, len(runs), rows):
        part = torch.tensor([[*tokens.prefix, *run] for run in runs[at : at + rows]], dtype=torch.int64, device="cpu")
        mask = torch.ones_like(part, dtype=torch.bool)
        mask[:, : len(tokens.prefix)] = False
        made.append({"input_ids": part, "loss_mask": mask})
    return made
