"""Token hashes: a hash of each row of token ids, which a saved cache holds, so that a caller's ids can be compared with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvcompile.errors import CacheUnfit

Tokens = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class TokenHashes:
    """Hashes of a cache's tokens: the number of tokens in each row (``length``), and one hash of 32 hex digits per row (``rows``)."""

    length: int
    rows: tuple[str, ...]

    def differing(self, tokens: Tokens) -> str:
        """Return how ``tokens`` differ from the hashed ones, as text such as "3 rows of tokens"; "" if they begin with them.

        Raises CacheUnfit unless ``tokens`` are integers [B, T] or [T].
        """
        ids = as_rows(tokens)
        if len(ids) != len(self.rows):
            return f"{len(ids)} rows of tokens"
        if ids.shape[1] < self.length:
            return f"{ids.shape[1]} tokens a row"
        other = [row for row, (own, its) in enumerate(zip(hashes(ids[:, : self.length]), self.rows, strict=True)) if own != its]
        return f"other tokens in row {', '.join(map(str, other))}" if other else ""


def as_rows(tokens: Tokens) -> torch.Tensor:
    """Return token ids as int64 [B, T] on the CPU. Raises CacheUnfit unless they are integers with one or two dims."""
    ids = torch.as_tensor(tokens).detach().cpu()
    if ids.is_floating_point() or ids.is_complex() or ids.dim() not in {1, 2}:
        raise CacheUnfit(
            expected="tokens= as integers [B, T] or [T]", found=f"{ids.dtype} {list(ids.shape)}",
            todo="pass the ids that the model was called with",
        )
    return ids.to(torch.int64).reshape(-1, ids.shape[-1])


def hashes(ids: torch.Tensor) -> tuple[str, ...]:
    """Return a hash of each row of token ids, int64 [B, T] on the CPU."""
    return tuple(hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:32] for row in ids)


def hashed(tokens: Tokens, sizes: Iterable[tuple[int, int]]) -> TokenHashes:
    """Return the hashes of a cache's tokens; ``sizes``: the (rows, length) of each of the cache's tensors, which must be equal.

    ``tokens``: ids of the cache's tokens, optionally with later ones. Raises CacheUnfit if the sizes differ, or if there are fewer rows or
    tokens than the cache has.
    """
    found = set(sizes)
    if len(found) != 1:
        raise CacheUnfit(
            expected="a cache whose tensors hold one number of tokens, to compare tokens= with",
            found="tensors of (rows, tokens) " + ", ".join(map(str, sorted(found))),
            todo="leave tokens= out, or save the parts by themselves",
        )
    (rows, length), ids = found.pop(), as_rows(tokens)
    if len(ids) != rows or ids.shape[1] < length:
        raise CacheUnfit(
            expected=f"tokens= of {rows} rows and at least {length} tokens, as the cache has", found=list(ids.shape),
            todo="pass the ids that the model was called with, prompt and answer, padding included",
        )
    return TokenHashes(length, hashes(ids[:, :length]))
