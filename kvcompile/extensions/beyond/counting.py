"""Sizes of learned tables and of the cache that uses them, in sympy: the paper's Appendix E.

Symbols: L layers, K kv heads, D channels per head, G channels per group, b bits of a code, s bits of a stored scale or zero point, B
sequences of S tokens. Tables are float32, counted once for a whole batch.
"""

from __future__ import annotations

import sympy

LAYERS, HEADS, CHANNELS, GROUP, BITS = sympy.symbols("L K D G b", integer=True, positive=True)
STATISTIC = sympy.Symbol("s", integer=True, positive=True)
ROWS, TOKENS = sympy.symbols("B S", integer=True, positive=True)

TABLES = 2 * LAYERS * HEADS * CHANNELS / GROUP
"""Tables of a model: one for keys and one for values of every layer, kv head and group."""

PARAMETERS = TABLES * (2 * 2**BITS - 1)
"""Levels and thresholds of all tables."""

CACHE_BITS = BITS + 2 * STATISTIC / GROUP
"""Stored bits per value: its code, and its share of its group's scale and zero point."""

AMORTIZED_BITS = CACHE_BITS + 32 * PARAMETERS / (2 * ROWS * LAYERS * TOKENS * HEADS * CHANNELS)
"""Stored bits per value for B sequences of S tokens, tables included."""
