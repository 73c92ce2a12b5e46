"""``kvcompile learn``: learns tables of a scheme for a model from text files."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvcompile.errors import BadBatch, TargetError
from kvcompile.extensions.beyond.learning import processes
from kvcompile.extensions.beyond.learning.learn import Learned, learn
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.text import CHAT_PROMPT, TokenEncoding, batches, documents, sequences, split
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.beyond.storage import save_tables
from kvcompile.schemes import parse
from kvcompile.settings import Inner
from kvcompile.tools.cli.interrupt import INTERRUPTED
from kvcompile.tools.cli.targets import TargetOptions, resolve

SHORTEST = 32
"""Tokens of the shortest sequences that are proposed for a small text."""


@contextlib.contextmanager
def joined(device: str) -> Iterator[str]:
    """Yield the device of this process; if ``torchrun`` started it, join the process group within the context.

    A process that joined waits for all others on exit and leaves the group, unless the context raised. A group that exists already is left
    alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if torch.distributed.is_initialized():
        yield device
        return
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    yield device
    # Wait for all before leaving: once in many runs a process aborted at exit when no process had left the group.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(arguments: argparse.Namespace) -> int:
    """Learn the tables and write them to a file; return the exit status. Raises TargetError for a scheme without tables."""
    scheme = parse(arguments.scheme)
    if not isinstance(scheme, Beyond):
        raise TargetError(found=arguments.scheme, why=f"only the scheme {Beyond.name!r} has tables to learn")
    settings = LearnSettings(
        steps=arguments.steps, batch=arguments.batch, rate=arguments.rate, inner=Inner.of(arguments.inner),
        memory_budget=arguments.memory_budget,
    )
    with joined(arguments.device) as device:
        return _learn(arguments, scheme, settings, device)


def _learn(arguments: argparse.Namespace, scheme: Beyond, settings: LearnSettings, device: str) -> int:
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    model = resolve(arguments.target, TargetOptions(dtype=dtype, device=device)).model
    tokens = tokens_of(arguments, model)
    training, held_out = held_apart(arguments, tokens)
    # Equally many for each process, since all of them take each step together.
    training = training[: len(training) // processes.count() * processes.count()]
    mine = slice(processes.rank(), None, processes.count())
    found: list[Learned] = []
    learned = learn(
        model, batches(training[mine], tokens, arguments.micro), scheme, validation=batches(held_out[mine], tokens, arguments.micro),
        settings=settings, run=arguments.folder, resume=arguments.resume, report=found.append,
    )
    stopped = bool(found) and found[0].stopped == "interrupted"
    if processes.rank() == 0:
        save_tables(learned, arguments.out, {"data": ", ".join(path.name for path in arguments.data)})
        Console(stderr=True).print(_summary(found[0], arguments.out), highlight=False)
    return INTERRUPTED if stopped else 0


def held_apart(arguments: argparse.Namespace, tokens: TokenEncoding) -> tuple[list[list[int]], list[list[int]]]:
    """Return (training, validation) sequences of the text files. Raises BadBatch, with options that fit, if the text is too short.

    Without ``--validation`` the default number of sequences is held out for validation, but at most a fifth of a small text.
    """
    texts = list(documents(arguments.data))
    runs = sequences(iter(texts), tokens, arguments.length)
    wanted = arguments.validation or min(arguments.held_out, len(runs) // 5)
    if len(runs) > max(wanted, 1):
        return split(runs, max(wanted, 1), arguments.seed)
    count = sum(len(tokens.encode(text)) for text in texts)
    # Ten sequences, of which two are held out.
    length = count // 10 + len(tokens.prefix)
    fits = f"pass --length {length} --validation 2" if length >= SHORTEST else f"pass more text: {10 * SHORTEST:,} tokens and more"
    raise BadBatch(
        expected=f"more than {max(wanted, 1)} sequences of {arguments.length:,} tokens, of which as many are held out",
        found=f"{len(runs)}: these files have {count:,} tokens", todo=fits,
    )


def _summary(found: Learned, out: Path) -> str:
    losses = f"validation {found.initial:.4f} to {found.best:.4f} nats a token" if found.initial is not None else "not validated"
    return f"{out}: {losses}, best at step {found.best_step} of {found.steps}; {found.stopped}"


def tokens_of(arguments: argparse.Namespace, model: Any) -> TokenEncoding:
    """Return how the command's model encodes text, with the ids that begin each sequence (--prefix, --bytes). Raises TargetError.

    ``model``: the loaded model, whose configuration may name the first id.
    """
    start = getattr(getattr(model, "config", None), "bos_token_id", None)
    if arguments.bytes:
        if arguments.prefix == "chat":
            raise TargetError(found=arguments.target, why="bytes have no chat template: pass --prefix start or none")
        return TokenEncoding(lambda text: list(text.encode()), () if arguments.prefix == "none" or start is None else (int(start),))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target, local_files_only=True)
    except (OSError, ValueError) as error:
        why = "it has no tokenizer: pass --bytes where its tokens are bytes"
        raise TargetError(found=arguments.target, why=why) from error
    template = getattr(tokenizer, "chat_template", None)
    wanted = arguments.prefix or ("chat" if template else "start")
    if wanted == "chat" and not template:
        raise TargetError(found=arguments.target, why="its tokenizer has no chat template: pass --prefix start or none")
    prefix: tuple[int, ...] = ()
    if wanted == "chat":
        asked = [{"role": "user", "content": CHAT_PROMPT}]
        ids: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        prefix = tuple(ids)
    elif wanted == "start" and start is not None:
        prefix = (int(start),)
    return TokenEncoding(lambda text: tokenizer.encode(text, add_special_tokens=False), prefix)
