"""A pool of blocks that stores codes from the start, allocated from sizes and a scheme; no dense tensor is ever made."""

from __future__ import annotations

import dataclasses

import torch

from kvcompile.errors import BadBlock
from kvcompile.schemes import Scheme
from kvcompile.serving import kernels, operations
from kvcompile.serving.block_layout import BlockLayout


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The blocks of one attention's keys and values, as codes; ``operations`` describes the arguments of its methods.

    ``data``: uint8 [blocks, K, bytes]. ``key_tables``, ``value_tables``: the schemes' constant planes, the same for all blocks.
    """

    layout: BlockLayout
    data: torch.Tensor
    key_tables: tuple[torch.Tensor, ...]
    value_tables: tuple[torch.Tensor, ...]
    text: str = dataclasses.field(init=False, repr=False)
    """``layout.text``, as a field since Dynamo cannot trace the property's code."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.layout.text)

    @property
    def tokens(self) -> int:
        """The number of tokens that the pool can hold."""
        return self.data.shape[0] * self.layout.page

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, and of the constant planes."""
        return self.data.nbytes + sum(table.nbytes for table in (*self.key_tables, *self.value_tables))

    @property
    def runs(self) -> dict[str, str]:
        """The code that runs "append keys", "append values" and "attend" on CUDA: "a kernel", or "tensor operations" with the reason."""
        return kernels.runs(self.layout, self.data)

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Encode new keys [T, K, D] and values [T, K, Dv] into slots [T] of the pool; tokens with negative slots are skipped."""
        operations.paged_append(k, v, self.data, slots, self.text, list(self.key_tables), list(self.value_tables))

    def attend(
        self, q: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, query_start: torch.Tensor, max_queries: int, *,
        scale: float | None = None, softcap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None,
        max_length: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (results [T, H, Dv], log-sums [T, H]) of attention with queries [T, H, D] over rows of blocks.

        ``scale``: the factor of scores, None for 1 / sqrt(head dim). ``operations`` describes the other arguments.
        """
        return operations.paged_attend(
            q, self.data, block_table, lengths, query_start, max_queries, self.text, list(self.key_tables),
            list(self.value_tables), self.layout.head_dim**-0.5 if scale is None else scale, softcap, window, sinks,
            max_length,
        )


def pool(
    blocks: int, heads: int, head_dim: int, scheme: Scheme | str = "int4", *, values: Scheme | str | None = None,
    value_dim: int | None = None, page: int = 16, dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
) -> Pool:
    """Return an empty pool of ``blocks`` blocks of ``page`` tokens for ``heads`` kv heads.

    ``dtype``: the model's dtype. ``values``: the scheme of the values, None for ``scheme``. ``value_dim``: channels of a value, None for
    ``head_dim``. ``device``: None for torch's default device. All ``blocks * layout.block_bytes`` bytes are allocated here. Raises NotPaged
    for a scheme that blocks cannot hold, and BadBlock for a number of blocks below 1.
    """
    layout = BlockLayout.of(scheme, heads, head_dim, values=values, value_dim=value_dim, page=page, dtype=dtype)
    if type(blocks) is not int or blocks < 1:
        raise BadBlock(what="blocks", expected="a whole number above 0", found=blocks)
    where = torch.get_default_device() if device is None else torch.device(device)
    return Pool(layout, torch.zeros(blocks, heads, layout.head_bytes, dtype=torch.uint8, device=where), *layout.tables(where))
