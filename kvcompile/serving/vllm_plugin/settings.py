"""Settings of the vLLM plugin: schemes, read from the environment variable ``KVCOMPILE_SCHEME``, and the block layout that follows."""

from __future__ import annotations

import functools
import os

import torch

from kvcompile.schemes import Scheme
from kvcompile.schemes.pairs import parse_pair
from kvcompile.serving.block_layout import LEAST_PAGE, BlockLayout

VARIABLE = "KVCOMPILE_SCHEME"
"""The environment variable with a scheme, ``int4`` or ``k=int8,v=int4``. Every process of the engine inherits it."""


def schemes() -> tuple[Scheme, Scheme] | None:
    """Return the schemes of keys and values that ``KVCOMPILE_SCHEME`` names, None if it is empty.

    Raises a SchemeError for an unknown scheme.
    """
    text = os.environ.get(VARIABLE, "").strip()
    return parse_pair(text) if text else None


@functools.lru_cache(maxsize=64)
def layout_of_blocks(
    keys: Scheme, values: Scheme, heads: int, head_dim: int, value_dim: int, page: int, dtype: torch.dtype,
) -> BlockLayout:
    """Return the layout of blocks of ``page`` tokens.

    Raises NotPaged, or the scheme's error if it needs tables, which a text does not contain.
    """
    layout = BlockLayout.of(keys, heads, head_dim, values=values, value_dim=value_dim, page=page, dtype=dtype)
    layout.tables(torch.device("cpu"))
    return layout


def bytes_of_token(keys: Scheme, values: Scheme, head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token and head, rounded up to a multiple of the size of ``dtype``.

    A page that is a multiple of 16 tokens loses no byte to alignment, so bytes of a token times tokens are the bytes of a page. Raises the
    errors of ``layout_of_blocks``.
    """
    exact = layout_of_blocks(keys, values, 1, head_dim, value_dim, LEAST_PAGE, dtype).head_bytes // LEAST_PAGE
    return -(-exact // dtype.itemsize) * dtype.itemsize
