"""The loss that tables are learned on: next-token negative log-likelihood in nats, summed over the tokens that a batch counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kvcompile.errors import BadBatch

Loss = Callable[[Callable[..., Any], Any], tuple[torch.Tensor, torch.Tensor]]
"""(compiled model, batch) -> (sum of the loss over counted tokens, number of counted tokens)."""

CHUNK = 1024
"""Tokens whose float32 logits are in memory at a time."""


class NextToken:
    """Next-token loss of batches of token ids, for models that take ``input_ids`` and return logits, bare or as ``.logits``.

    A batch is ids int64 [B, S], or a mapping with ``input_ids`` and optionally ``loss_mask`` [B, S]: False for a token that is not a
    target (a chat prefix, padding). The first token is never a target.

    A call takes (run, batch) and returns (sum of losses in nats, number of targets). It raises BadBatch for a batch of another form, and
    for a model whose result is not logits [B, S, vocabulary].
    """

    def __init__(self, model: torch.nn.Module) -> None:
        names = inspect.signature(model.forward).parameters
        self.named = "input_ids" in names
        self.extra = {"use_cache": False} if "use_cache" in names else {}

    def __call__(self, run: Callable[..., Any], batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = parts(batch)
        result = run(input_ids=ids, **self.extra) if self.named else run(ids, **self.extra)
        logits = getattr(result, "logits", result)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            raise BadBatch(
                expected="logits [B, S, vocabulary] from the model", found=type(result).__name__,
                todo="pass a loss of your own: loss=lambda run, batch: (sum, count)",
            )
        kept = mask[:, 1:].reshape(-1)
        targets, flat = ids[:, 1:].reshape(-1), logits[:, :-1].flatten(0, 1)
        total = flat.new_zeros((), dtype=torch.float32)
        for at in range(0, len(targets), CHUNK):
            total = total + checkpoint(_chunk, flat[at : at + CHUNK], targets[at : at + CHUNK], kept[at : at + CHUNK], use_reentrant=False)
        return total, kept.sum()


def _chunk(logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (cross_entropy(logits.float(), targets, reduction="none") * kept).sum()


def parts(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch as (ids int64 [B, S], target mask bool [B, S]). Raises BadBatch unless these are its tensors."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or ids.shape[1] < 2:
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise BadBatch(expected="token ids int64 [B, S] with S >= 2", found=found, todo="pass tensors, or mappings with input_ids")
    mask = given.get("loss_mask")
    if mask is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise BadBatch(expected=f"a loss_mask of {tuple(ids.shape)}", found=getattr(mask, "shape", type(mask).__name__), todo="one a token")
    return ids, mask.to(torch.bool)
