"""The capacity figures of two sources, reproduced by their own formulas and set beside what a plan counts.

    python benchmarks/plan_source.py

"KV Cache Quantization: FP8, INT8, INT4, ..." has a table (Llama-2-70B, 80 GB, INT4 weights) and a function that recommends a precision;
they disagree by a factor of four. "Runtime-Certified Bounded-Error Quantized Attention" has Eq. 19 and Table 21: the blocks of originals
that all query heads of a layer ask for together, and so the device memory that a cache of them saves. Its savings are
reproduced with its own 56% for codes and its half of dense for keys. Nothing here is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

LAYERS, HEADS, CHANNELS, CONTEXT = 80, 8, 128, 4096
GB = 10**9
PRINTED = {"FP16": (1.34, 32), "FP8": (0.67, 64), "INT8": (0.67, 64), "INT4": (0.34, 120)}
"""The source's table: GB a request and the largest batch, by precision."""
BYTES = {"FP16": 2.0, "FP8": 1.0, "INT8": 1.0, "INT4": 0.5}
WEIGHTS, MEMORY, KEPT_FREE = 35.0, 80.0, 2.0
CODE_REQUEST = 0.33
"""GB a request of FP16 in the source's function."""
TABLE_21 = {8192: (1.00, -0.06), 32768: (0.99, -0.05), 65536: (0.87, 0.01), 131072: (0.64, 0.12), 262144: (0.39, 0.25)}
"""The source's Table 21: the share of blocks in the union and the saving, by context."""


@dataclass(frozen=True)
class Source:
    """One precision: GB a request by the source's equation, the batch that its table's 45 GB hold, and the batch of its function."""

    request: float
    batch: int
    code_batch: int


def by_source(precision: str) -> Source:
    """The source's two ways to a batch, from its own equation and its own constants."""
    request = 2 * LAYERS * HEADS * CHANNELS * CONTEXT * BYTES[precision] / GB
    in_code = CODE_REQUEST * BYTES[precision] / BYTES["FP16"]
    return Source(request, int((MEMORY - WEIGHTS) / request), int((MEMORY - WEIGHTS - KEPT_FREE) / in_code))


def union(tokens: int, heads: int = 32, most: int = 128, block: int = 16) -> float:
    """Eq. 19: the share of blocks that ``heads`` query heads ask for together, each 2 * ``most`` of them, as if independently."""
    blocks = math.ceil(tokens / block)
    return 1 - (1 - min(2 * most, blocks) / blocks) ** heads


def saving(tokens: int, codes: float = 0.56) -> float:
    """Table 21: device memory that is saved where codes take ``codes`` of dense and every key of the union is kept."""
    return 1 - codes - union(tokens) / 2


def main() -> None:
    """Print both tables."""
    table = Table(title=f"Llama-2-70B, {CONTEXT} tokens, {MEMORY:g} GB, weights {WEIGHTS:g} GB", title_justify="left")
    for name in ("", "GB a request: printed, computed", "batch: printed, 45 GB / computed", "batch of its function"):
        table.add_column(name)
    for precision, (size, batch) in PRINTED.items():
        found = by_source(precision)
        table.add_row(precision, f"{size}, {found.request:.4f}", f"{batch}, {found.batch}", str(found.code_batch))
    union_table = Table(title="Eq. 19 and Table 21", title_justify="left")
    for name in ("tokens", "union: printed, computed", "saving: printed, computed"):
        union_table.add_column(name)
    for tokens, (share, saved) in TABLE_21.items():
        union_table.add_row(f"{tokens:,}", f"{share:.0%}, {union(tokens):.1%}", f"{saved:+.0%}, {saving(tokens):+.1%}")
    console = Console()
    console.print(table)
    console.print(union_table)


if __name__ == "__main__":
    main()
