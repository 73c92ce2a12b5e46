"""Values as they are written into a cache, in whatever layout, become the new tokens of one slot: [B, K, S, D], with these numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from kvcompile.passes.graph.emit import Emitter
from kvcompile.passes.rewrite.new_tokens import new_tokens

ROWS, HEADS, TOKENS, CHANNELS, CAPACITY = 2, 3, 4, 5, 9
K, V = torch.arange(2 * ROWS * HEADS * TOKENS * CHANNELS, dtype=torch.float32).view(2, ROWS, HEADS, TOKENS, CHANNELS)


def taken(
    values: torch.Tensor, held: tuple[int, ...], labels: tuple[str, ...], select: dict[int, int] | None = None,
    counts: dict[int, int] | None = None,
) -> torch.Tensor:
    """The new tokens of a slot of a cache of sizes ``held`` with dims of these roles, into which ``values`` are written at the tokens.

    ``select``: {dim: index, or the first of ``counts[dim]`` indices}, of the part of the cache that is the slot.
    """
    graph = fx.Graph()
    given, root = graph.placeholder("values"), graph.placeholder("cache")
    given.meta["val"], root.meta["val"] = values, torch.empty(held)
    output = graph.output(given)
    write = SimpleNamespace(
        values=given, dims=tuple(range(len(held))), token_dim=labels.index("T"), count=TOKENS, first_rows=None, select=(), node=given,
    )
    axes = SimpleNamespace(
        labels=tuple(tuple(label) for label in labels), select=tuple((select or {}).items()), counts=tuple((counts or {}).items()),
    )
    spec = SimpleNamespace(head_dim=CHANNELS, heads=HEADS, dtype=torch.float64)
    slot: Any = SimpleNamespace(slot=SimpleNamespace(axes=axes, write=write, root=root), spec=spec)
    output.args = (new_tokens(Emitter(graph, output, lambda size: size, {given: given}), slot),)
    return fx.GraphModule({}, graph)(values, root.meta["val"])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("values", "held", "labels", "select", "counts"), [
    (K, (ROWS, HEADS, CAPACITY, CHANNELS), ("B", "K", "T", "D"), {}, {}),
    (K.permute(2, 0, 1, 3), (CAPACITY, ROWS, HEADS, CHANNELS), ("T", "B", "K", "D"), {}, {}),
    (K.mT, (ROWS, HEADS, CHANNELS, CAPACITY), ("B", "K", "D", "T"), {}, {}),
    (K.transpose(1, 2).flatten(2), (ROWS, CAPACITY, HEADS * CHANNELS), ("B", "T", "KD"), {}, {}),
    (K.flatten(0, 1), (ROWS * HEADS, CAPACITY, CHANNELS), ("BK", "T", "D"), {}, {}),
    (torch.stack([V, K]), (2, ROWS, HEADS, CAPACITY, CHANNELS), ("", "B", "K", "T", "D"), {0: 1}, {}),
    (torch.stack([V, K], 2).flatten(0, 1), (ROWS * HEADS, 2, CAPACITY, CHANNELS), ("BK", "", "T", "D"), {1: 1}, {}),
    (torch.stack([V, K], 3).flatten(0, 1), (ROWS * HEADS, CAPACITY, 2, CHANNELS), ("BK", "T", "", "D"), {2: 1}, {}),
    (torch.cat([V, K], -1), (ROWS, HEADS, CAPACITY, 2 * CHANNELS), ("B", "K", "T", "D"), {3: CHANNELS}, {3: CHANNELS}),
    (torch.cat([V, K], -1).flatten(0, 1), (ROWS * HEADS, CAPACITY, 2 * CHANNELS), ("BK", "T", "D"), {2: CHANNELS}, {2: CHANNELS}),
    (torch.cat([V, K], 1).transpose(1, 2).flatten(2), (ROWS, CAPACITY, 2 * HEADS * CHANNELS), ("B", "T", "KD"), {2: HEADS * CHANNELS},
     {2: HEADS * CHANNELS}),
], ids=[
    "plain", "tokens-first", "channels-first", "heads-beside-channels", "rows-and-heads", "stacked", "stacked-behind-rows-and-heads",
    "stacked-behind-tokens", "joined-channels", "joined-channels-behind-rows-and-heads", "joined-heads",
])
def test_the_tokens_of_a_slot(
    values: torch.Tensor, held: tuple[int, ...], labels: tuple[str, ...], select: dict[int, int], counts: dict[int, int],
) -> None:
    found = taken(values, held, labels, select, counts)
    assert found.dtype is torch.float64 and torch.equal(found.float(), K)


def test_values_that_broadcast_over_rows_are_written_into_every_row() -> None:
    found = taken(K[0], (ROWS, HEADS, CAPACITY, CHANNELS), ("B", "K", "T", "D"))
    assert torch.equal(found.float(), K[:1].expand(ROWS, -1, -1, -1))
