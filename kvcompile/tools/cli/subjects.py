"""Subjects of evaluation: tinylm with its held-out text, or a checkpoint folder, GGUF file or packaged model with its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import BadBatch, BadEvaluation, TargetError
from kvcompile.extensions.beyond.learning.text import documents
from kvcompile.tools.cli.packaged import PACKAGED, gguf_file
from kvcompile.tools.cli.shipped import examples, require
from kvcompile.tools.cli.targets import TargetOptions, quiet, resolve, silent_bars, static_cache
from kvcompile.tools.evaluation.corpus import Passage, own_passages
from kvcompile.tools.evaluation.subject import AnswerRule, Span, Subject, TokenWriting
from kvcompile.tools.evaluation.tasks import BYTES

TINYLM = examples() / "tinylm"
SHIPPED = {"tinylm": TINYLM, "tinylm-16k": TINYLM.with_name("tinylm_16k")}
"""Byte-level models in the repository, by the names that commands take."""
TRAINED = ("needle", "multikey", "variable")
"""Tasks that both models were trained on: one line among filler, one of many lines, a chain of assignments."""


def named(
    target: str | None, data: Sequence[Path] = (), device: str = "cpu", dtype: torch.dtype | None = None, as_bytes: bool = False
) -> Subject:
    """Return the subject that a command names: a byte-level model (None: tinylm), or a model with its tokenizer. Raises TargetError.

    ``data``: text files for prompts. ``as_bytes``: ``target`` is the folder of a byte-level model.
    """
    name = target or "tinylm"
    if name in SHIPPED or as_bytes:
        return tinylm(device, dtype, SHIPPED.get(name, Path(name)), data)
    return checkpoint(name, data, device, dtype)


def tinylm(
    device: str = "cpu", dtype: torch.dtype | None = None, folder: Path = TINYLM, data: Sequence[Path] = ()
) -> Subject:
    """Return tinylm, or the byte-level model in ``folder``, as a subject, with its held-out text or the text of the files ``data``.

    Raises TargetError if the model cannot be loaded.
    """
    for shipped in {TINYLM, folder} & {TINYLM, *SHIPPED.values()}:
        require(shipped)
    if str(TINYLM.parent) not in sys.path:
        sys.path.insert(0, str(TINYLM.parent))
    codec, corpus = import_module("tinylm.codec"), import_module("tinylm.corpus")
    kind = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    model = resolve(str(folder), TargetOptions(dtype=kind, device=device)).model
    text = joined(data).encode() if data else corpus.heldout_text()
    name = next((name for name, shipped in SHIPPED.items() if shipped == folder.resolve()), str(folder))
    return Subject(
        name, model, device, BYTES, text, (codec.BOS,), codec.decode, AnswerRule.LINE,
        lambda tokens: static_cache(model, tokens), longest(model), TRAINED,
    )


def checkpoint(path: str, data: Sequence[Path] = (), device: str = "cpu", dtype: torch.dtype | None = None) -> Subject:
    """Return a model with its tokenizer: a checkpoint folder, a GGUF file or a packaged model's name. Raises TargetError.

    ``data``: text files for prompts, each a kind of text; empty: the prose, code and document of ``corpus``.
    """
    target = resolve(path, TargetOptions(dtype=dtype, device=device))
    if not Path(path).is_dir() and gguf_file(path) is None:
        why = "measuring quality needs a checkpoint folder or GGUF file with a tokenizer: random weights answer nothing"
        raise TargetError(found=path, why=why)
    tokenizer = tokenizer_of(path)
    model: Any = target.model
    passages = read_passages(data) if data else own_passages()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    with quiet():
        parts = [encode(f"{passage.text}\n\n") for passage in passages]
    filler, ends = [item for part in parts for item in part], list(accumulate(map(len, parts)))
    spans = tuple(Span(each.kind, end - len(part), end) for each, part, end in zip(passages, parts, ends, strict=True))
    start = () if tokenizer.bos_token_id is None else (int(tokenizer.bos_token_id),)
    return Subject(
        path, model, device, TokenWriting(encode, text), filler, start, text, AnswerRule.PARTS, lambda tokens: static_cache(model, tokens),
        longest(model), PACKAGED[path].tasks if path in PACKAGED else (), spans,
    )


def joined(data: Sequence[Path]) -> str:
    """Return the texts of files as one string. Raises BadEvaluation if one cannot be read."""
    try:
        return "\n\n".join(documents(data))
    except BadBatch as error:
        raise BadEvaluation(setting="--data", **error.facts) from error


def read_passages(data: Sequence[Path]) -> tuple[Passage, ...]:
    """Return the text of each file as one passage, whose kind is named after the file. Raises BadEvaluation if one cannot be read."""
    return tuple(Passage(path.stem, joined([path])) for path in data)


def tokenizer_of(path: str) -> Any:
    """Return the tokenizer of a checkpoint folder, a GGUF file or a packaged model. Raises TargetError."""
    from transformers import AutoTokenizer

    file = gguf_file(path)
    try:
        with quiet(), silent_bars():
            if file is not None:
                return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        why = f"its tokenizer could not be read ({type(error).__name__}: {error}); pass --bytes where its tokens are bytes, as tinylm's are"
        raise TargetError(found=path, why=why) from error


def longest(model: Any) -> int | None:
    """Return the number of positions that a model's configuration states, or None."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
