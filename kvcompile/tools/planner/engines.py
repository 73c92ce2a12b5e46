"""Serving engines in numbers: bytes of a token in an engine's blocks under a scheme, and the tokens that a memory holds, before it starts.

Blocks are those of ``serving.block_layout``; bytes are what the engine's allocator counts for them, so a plan equals the start line.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcompile.errors import KvcompileError, NotPlanned
from kvcompile.schemes import Scheme
from kvcompile.serving.block_layout import LEAST_PAGE, BlockLayout
from kvcompile.serving.vllm_plugin.settings import bytes_of_token
from kvcompile.tools.planner.stores import Stores
from kvcompile.types import Role


class Engine(enum.Enum):
    """An engine that serves over codes, by its name on the command line."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"

    def command(self, scheme: str, model: str) -> str:
        """Return the line that serves ``model`` under ``scheme``, for a shell or for Python."""
        if self is Engine.VLLM:
            return f"KVCOMPILE_SCHEME='{scheme}' vllm serve {model} --attention-backend CUSTOM"
        return f'kvcompile.serving.install(model, "{scheme}"); model.generate_batch(prompts)'


@dataclass(frozen=True)
class EngineLayer:
    """The cache of one attention: kv heads, channels of a key and of a value, dtype; ``window``: tokens that it keeps, None for all."""

    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def dense_bytes(self) -> int:
        """Bytes of one token in the model's dtype."""
        return self.heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def token_bytes(self, engine: Engine, keys: Scheme, values: Scheme) -> int:
        """Return the bytes of one token in the engine's blocks.

        Raises NotPaged for a scheme that blocks cannot hold, and the scheme's own error for heads or missing tables.
        """
        if engine is Engine.VLLM:
            return self.heads * bytes_of_token(keys, values, self.head_dim, self.value_dim, self.dtype)
        made = BlockLayout.of(keys, self.heads, self.head_dim, values=values, value_dim=self.value_dim, page=LEAST_PAGE, dtype=self.dtype)
        made.tables(torch.device("cpu"))
        return made.block_bytes // LEAST_PAGE


@dataclass(frozen=True)
class EngineOption:
    """One scheme in an engine: the bytes of a token over all layers, ``token`` in its codes and ``dense`` in the model's dtype.

    ``tokens``: number of tokens that fit.
    """

    label: str
    keys: Scheme
    values: Scheme
    token: int
    dense: int
    tokens: int

    @property
    def dense_tokens(self) -> int:
        """Number of tokens in the model's dtype that fit in the same bytes."""
        return self.tokens * self.token // self.dense

    def requests(self, context: int) -> int:
        """Return how many requests of ``context`` tokens fit, in whole blocks."""
        return self.tokens // (-(-context // LEAST_PAGE) * LEAST_PAGE)


def layers_of(stores: Stores, name: str) -> tuple[EngineLayer, ...]:
    """Return the layers whose caches an engine would hold; ``name``: the model's, for the error.

    Raises NotPlanned for what blocks do not hold: caches that are written once, as of cross-attention, states that are no keys and values,
    and an attention without a key and a value slot of its own.
    """
    others = stores.remainder.nbytes(1, 1)
    if others or any(item.once is not None for item in stores.stored):
        found = f"{others} bytes of other states a request" if others else "a cache that is written once, as of cross-attention"
        raise NotPlanned(expected="keys and values of a decoder's own tokens alone, for an engine's blocks", found=found, name=name)
    by_path: dict[str, dict[Role, list[EngineLayer]]] = {}
    for item in stores.stored:
        slot, window = item.slot, item.end if item.forgets else None
        layer = EngineLayer(slot.heads, slot.head_dim, slot.head_dim, slot.dtype, window)
        by_path.setdefault(item.path, {Role.KEY: [], Role.VALUE: []})[slot.role].append(layer)
    made = []
    for path, roles in by_path.items():
        if len(roles[Role.KEY]) != len(roles[Role.VALUE]):
            found = f"{len(roles[Role.KEY])} and {len(roles[Role.VALUE])} at {path or 'an attention'}"
            raise NotPlanned(expected="as many caches of keys as of values at each attention", found=found, name=name)
        made += [
            EngineLayer(key.heads, key.head_dim, value.head_dim, key.dtype, key.window)
            for key, value in zip(roles[Role.KEY], roles[Role.VALUE], strict=True)
        ]
    return tuple(made)


def option_of(
    label: str, pair: tuple[Scheme, Scheme], layers: Sequence[EngineLayer], engine: Engine, memory: int
) -> EngineOption | KvcompileError:
    """Return what ``memory`` bytes of blocks hold under a pair of schemes, or the error that says why blocks cannot hold it."""
    try:
        token = sum(layer.token_bytes(engine, *pair) for layer in layers)
    except KvcompileError as error:
        return error
    blocks = max(memory, 0) // (token * LEAST_PAGE)
    return EngineOption(label, *pair, token, sum(layer.dense_bytes for layer in layers), blocks * LEAST_PAGE)
