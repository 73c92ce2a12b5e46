"""Allocators of transformers' paged cache whose pages hold codes: the engine's own flat memory becomes one pool a layer.

A block of the engine has a page of each layer side by side, so layer i's pool is uint8 [blocks, K, bytes] with the stride of a block, a
view of the flat tensor. Nothing else is allocated. Copies of blocks (forks, offloading) move bytes, and stay right.

Imported where transformers is at hand, by ``installation`` alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as engine
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator, SlidingAttentionCacheAllocator

from kvcompile.errors import EngineUnfit
from kvcompile.serving.continuous_batching.memory import ServedLayers
from kvcompile.serving.continuous_batching.versions import ENGINE
from kvcompile.serving.pools import Pool

BUILDING: contextvars.ContextVar[ServedLayers | None] = contextvars.ContextVar("BUILDING", default=None)
"""The layers of the model whose cache is being built in this thread, None for a model without codes."""
LOCK = threading.Lock()
SKIPPED = -1
"""The slot of padding tokens, which ``paged_append`` skips."""


class CodesAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """The allocator of full-attention layers over codes. Write indices are slots, read indices are the blocks of each row in order."""

    rows_per_token = 1
    layer_type = "full_attention"

    def __new__(cls, **given: Any) -> Any:
        """Return the engine's own allocator where no model of ours is being built."""
        return super().__new__(cls) if BUILDING.get() is not None else STOCK[cls.layer_type](**given)

    def __init__(self, **given: Any) -> None:
        served = BUILDING.get()
        assert served is not None
        self.served = served
        super().__init__(**given)
        # A slot counts the tokens of one layer: the engine's rows of the other layers are not in its pool.
        self.block_physical_stride = self.tokens_per_page
        self.called = set[int]()
        """The layers that have attended over codes, outside of a compiler."""

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int) -> int:
        """Return the bytes of a page of one layer: its codes where a model of ours is being built."""
        served = BUILDING.get()
        if served is None:
            return int(FullAttentionCacheAllocator.get_bytes_per_page(num_key_value_heads, head_dim, cache_dtype, page_size))
        return served.page_bytes(num_key_value_heads, head_dim, cache_dtype, page_size)

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any) -> None:
        """Take the engine's flat memory, and view it as a pool for each layer."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = SKIPPED
        self.pools = {layer: self._pool(place, layer) for place, layer in enumerate(self.layer_indices)}

    def _pool(self, place: int, layer: int) -> Pool:
        """Return the pool of a layer whose page is the one number ``place`` in a block."""
        layout = self.served.layout(layer, self.num_key_value_heads, self.head_dim, self.cache_dtype, self.tokens_per_page)
        pages = self._copy_view[:, place * self.bytes_per_page : (place + 1) * self.bytes_per_page]
        data = pages.unflatten(1, (layout.heads, layout.head_bytes))
        return Pool(layout, data, *layout.tables(data.device))

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the blocks of a request that have tokens after this step, in order."""
        used = -(-(past_length + query_length) // self.tokens_per_page)
        return list(self.block_table[request_id][:used])

    def update(self, *given: object, **named: object) -> Any:
        """Raise EngineUnfit: the engine's own attention functions would read codes as keys."""
        raise EngineUnfit(
            engine=ENGINE, expected="a model whose attentions call the function that its config names",
            found="a call of the engine's own attention function", todo="serve this model without kvcompile.serving.install",
        )

    get_cache_for_block_table = update


class SlidingCodesAllocator(CodesAllocator):
    """The allocator of sliding-window layers over codes: it keeps all tokens, and the attention looks at the window's.

    The engine's own is a ring, in which a step's new tokens overwrite those that its first queries still see.
    """

    layer_type = "sliding_attention"
    # As the engine's: it is asked of models without codes as well.
    supports_block_table = False

    def __init__(self, *, config: Any, **given: Any) -> None:
        super().__init__(config=config, **given)
        self.window = int(config.sliding_window)
        # What the scheduler takes for the most tokens that a request reads: all of them.
        self.sliding_window = 2**62


STOCK = {"full_attention": FullAttentionCacheAllocator, "sliding_attention": SlidingAttentionCacheAllocator}
OURS = {kind.layer_type: kind for kind in (CodesAllocator, SlidingCodesAllocator)}


@contextlib.contextmanager
def building(served: ServedLayers) -> Iterator[None]:
    """Within the context, caches of the engine that this thread builds are made of codes."""
    with LOCK:
        table: dict[str, Any] = engine.ATTN_TYPE_TO_ALLOCATOR
        names, former = vars(engine), dict(table)
        token = BUILDING.set(served)
        table |= OURS
        # The engine asks the class by this name for the bytes of a block.
        names["FullAttentionCacheAllocator"] = CodesAllocator
        try:
            yield
        finally:
            names["FullAttentionCacheAllocator"] = FullAttentionCacheAllocator
            table |= former
            BUILDING.reset(token)
