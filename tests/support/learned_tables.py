"""Tables of no even spacing for the attentions of a model: not learned, but each layer, half, head and group has its own."""

from __future__ import annotations

import torch

from kvcompile.extensions.beyond.tables import ModelTables, SiteTables, Table
from kvcompile.schemes import Beyond


def random_table(bits: int, heads: int, groups: int, seed: int) -> Table:
    """A table whose levels leave the range of a group at both ends, and thresholds in order between."""
    generator = torch.Generator().manual_seed(seed)
    top = 2**bits - 1
    levels = torch.arange(top + 1) + torch.randn(heads, groups, top + 1, generator=generator) * 0.4
    thresholds = (torch.arange(top) + 0.5 + (torch.rand(heads, groups, top, generator=generator) - 0.5) * 0.9).sort(-1).values
    return Table(levels, thresholds)


def random_tables(paths: list[str], heads: int = 2, groups: int = 1, bits: int = 4, group: int = 32, seed: int = 0) -> Beyond:
    """A scheme with random tables for attentions at module paths."""
    sites = {
        path: SiteTables(*(random_table(bits, heads, groups, seed + 2 * at + half) for half in range(2))) for at, path in enumerate(paths)
    }
    return Beyond(bits, group, trained=True, tables=ModelTables(sites, "test", group))


def llama_paths(layers: int) -> list[str]:
    """The module paths of a Llama's attentions."""
    return [f"model.layers.{at}.self_attn" for at in range(layers)]
