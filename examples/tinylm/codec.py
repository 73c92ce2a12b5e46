"""Byte codec: text and bytes to token ids and back, with no tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable

import torch

BYTES = 256
BOS = 256
EOS = 257
PAD = 258
# A multiple of eight keeps the embedding's matrix products on fast paths; the ids above PAD
# are never seen in training.
VOCAB_SIZE = 264


def encode(text: str | bytes, *, bos: bool = True) -> list[int]:
    """Token ids of a text: one id a byte of its UTF-8 form, after a start token if `bos`."""
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return [BOS, *raw] if bos else list(raw)


def encode_tensor(text: str | bytes, *, bos: bool = True) -> torch.Tensor:
    """Token ids of a text as an int64 tensor of shape (T,)."""
    return torch.tensor(encode(text, bos=bos), dtype=torch.long)


def decode_bytes(ids: Iterable[int]) -> bytes:
    """Bytes of token ids; special tokens are dropped."""
    return bytes(i for i in map(int, ids) if i < BYTES)


def decode(ids: Iterable[int]) -> str:
    """Text of token ids; special tokens are dropped, bytes that are no UTF-8 are replaced."""
    return decode_bytes(ids).decode("utf-8", errors="replace")
