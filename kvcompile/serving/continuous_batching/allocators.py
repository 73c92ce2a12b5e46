"""Allocators for transformers' paged cache with pages of codes: they view the engine's own memory as one pool for each layer.

A block of the engine has one page of each layer, side by side. So the pool of a layer is uint8 [blocks, K, bytes], a view of the engine's
flat tensor with the stride of a block; nothing else is allocated. The engine copies blocks (forks, offloading) as bytes, which keeps codes
intact.

Only ``installation`` imports this module, since it needs transformers.
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
    """The allocator of full-attention layers over codes: write indices are slots, read indices are the blocks of each request in order."""

    rows_per_token = 1
    layer_type = "full_attention"

    def __new__(cls, **given: Any) -> Any:
        """Return a new allocator; the engine's own kind unless this thread is building a cache for a model with codes."""
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
        """Return the bytes of one layer's page: of codes if this thread builds a cache for a model with codes, else of dense tokens.

        Raises EngineUnfit if layers of codes differ in it.
        """
        served = BUILDING.get()
        if served is None:
            return int(FullAttentionCacheAllocator.get_bytes_per_page(num_key_value_heads, head_dim, cache_dtype, page_size))
        return served.page_bytes(num_key_value_heads, head_dim, cache_dtype, page_size)

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any) -> None:
        """Store the engine's flat memory ``cache_tensor``, and views of it as one pool for each layer."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = SKIPPED
        self.pools = {layer: self._pool(place, layer) for place, layer in enumerate(self.layer_indices)}

    def _pool(self, place: int, layer: int) -> Pool:
        """Return the pool of layer ``layer``, whose page has index ``place`` in each block of the engine."""
        layout = self.served.layout(layer, self.num_key_value_heads, self.head_dim, self.cache_dtype, self.tokens_per_page)
        pages = self._copy_view[:, place * self.bytes_per_page : (place + 1) * self.bytes_per_page]
        data = pages.unflatten(1, (layout.heads, layout.head_bytes))
        return Pool(layout, data, *layout.tables(data.device))

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the indices of the blocks that hold a request's tokens after this step, in order."""
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
    """The allocator of sliding-window layers over codes: it keeps all tokens of a request, and attention masks those outside of the window.

    The engine's own allocator is a ring buffer, in which a step's new tokens overwrite tokens that its first queries still see.
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
    """Make the engine allocate caches of codes, for the layers ``served``, if this thread builds them inside of the context."""
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
