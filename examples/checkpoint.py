"""The model of the other examples: tinylm of this folder, or any causal checkpoint of transformers; a text goes in, token ids come out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tinylm import codec
from transformers import AutoModelForCausalLM, AutoTokenizer

TINYLM = Path(__file__).resolve().parent / "tinylm"


@dataclass(frozen=True)
class Checkpoint:
    """A causal model with its text encoding. ``encode``: text to ids [1, S] on the model's device; ``decode``: ids [S] to text."""

    model: Any
    encode: Callable[[str], torch.Tensor]
    decode: Callable[[torch.Tensor], str]


def load(path: str | Path = TINYLM) -> Checkpoint:
    """Return the model of a folder or a hub's name, on the GPU in bfloat16 if there is one; tinylm reads bytes and has no tokenizer."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    if Path(path) == TINYLM:
        return Checkpoint(model, lambda text: codec.encode_tensor(text)[None].to(device), lambda ids: codec.decode(ids.tolist()))
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Checkpoint(
        model, lambda text: tokenizer(text, return_tensors="pt").input_ids.to(device),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


def dense_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of one token's keys and values in every layer of a model, uncompressed."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize)


def arguments(text: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with ``--model`` and ``--scheme``, and an option of whole numbers for each of ``numbers``, its default."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--model", default=TINYLM, help="a folder or a hub's name of a causal model (default: tinylm)")
    parser.add_argument("--scheme", default="int4", help="the cache's scheme (default: int4)")
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help=f"(default: {number})")
    return parser
