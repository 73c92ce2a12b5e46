"""ServedLayers: the schemes of a model's layers, and from them each layer's block layout and page size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kvcompile.errors import EngineUnfit
from kvcompile.schemes import Scheme
from kvcompile.serving.block_layout import BlockLayout
from kvcompile.serving.continuous_batching.versions import ENGINE


@dataclasses.dataclass(frozen=True)
class ServedLayers:
    """The schemes of keys and of values by layer index, each with the learned tables or scales of its layer."""

    schemes: Mapping[int, tuple[Scheme, Scheme]]

    def layout(self, layer: int, heads: int, head_dim: int, dtype: torch.dtype, page: int) -> BlockLayout:
        """Return the block layout of layer ``layer``. Raises the errors of ``BlockLayout``."""
        keys, values = self.schemes[layer]
        return BlockLayout.of(keys, heads, head_dim, values=values, page=page, dtype=dtype)

    def page_bytes(self, heads: int, head_dim: int, dtype: torch.dtype, page: int) -> int:
        """Return the bytes of one layer's page.

        Raises EngineUnfit if layers differ in it, since the engine has one page size for all layers.
        """
        found = {self.layout(layer, heads, head_dim, dtype, page).block_bytes for layer in self.schemes}
        if len(found) != 1:
            raise EngineUnfit(
                engine=ENGINE, expected="blocks of one size in all layers", found=f"{sorted(found)} bytes",
                todo="choose schemes whose layers take the same bytes",
            )
        return found.pop()
