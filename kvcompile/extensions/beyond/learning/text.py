"""Text as batches to learn from: sequences of one length after a prefix that is context and no target (the paper's Appendix A)."""

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
"""The user's message that plain text answers, for models trained on chats."""


@dataclass(frozen=True)
class TokenEncoding:
    """The encoding of text as tokens: a function from text to token ids, and the ids (``prefix``) put before every sequence.

    The ids of the prefix are context, not targets.
    """

    encode: Callable[[str], Sequence[int]]
    prefix: tuple[int, ...] = ()


def documents(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of files: a whole file, or the ``text`` of every line of a .jsonl. Raises BadBatch for a file that cannot be read."""
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
            if path.suffix != ".jsonl":
                yield content
                continue
            # Other line ends may occur inside a JSON text.
            for line in filter(str.strip, content.split("\n")):
                yield as_declared(str, parsed(line, dict[str, Any], path.name).get("text"), f"{path.name}.text")
        except (OSError, UnicodeDecodeError, FileUnfit) as error:
            found = f"{path}: {type(error).__name__}: {error}"
            raise BadBatch(expected="text in UTF-8, or lines of JSON with a text", found=found, todo="correct the file") from error


def sequences(texts: Iterator[str], tokens: TokenEncoding, length: int) -> list[list[int]]:
    """Return the documents' token ids, joined and cut into sequences of ``length`` less the prefix's length; an incomplete last is dropped.

    Raises BadBatch if ``length`` leaves fewer than two tokens after the prefix.
    """
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
    """Return (training, validation) sequences: ``runs`` shuffled by ``seed`` and divided, with ``validation`` sequences for validation.

    Raises BadBatch if there are too few.
    """
    if len(runs) <= validation:
        raise BadBatch(
            expected=f"more than {validation} sequences, of which as many are held out", found=f"{len(runs)} in these files",
            todo="pass more text, a smaller length or fewer for validation",
        )
    order = list(runs)
    random.Random(seed).shuffle(order)
    return order[validation:], order[:validation]


def batches(runs: Sequence[Sequence[int]], tokens: TokenEncoding, rows: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of ``rows`` sequences, each after the prefix, whose tokens are not targets; the last batch may have fewer."""
    made = []
    for at in range(0, len(runs), rows):
        part = torch.tensor([[*tokens.prefix, *run] for run in runs[at : at + rows]], dtype=torch.int64, device="cpu")
        mask = torch.ones_like(part, dtype=torch.bool)
        mask[:, : len(tokens.prefix)] = False
        made.append({"input_ids": part, "loss_mask": mask})
    return made
