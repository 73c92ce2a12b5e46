"""The attend template, from its files; the glossary of its symbols is at the top of ``operands.jinja``.

Rendered by Inductor (``lower``) and, with replacements for Inductor's hooks, by ``offline``.
"""

from __future__ import annotations

from kvcompile.lowering.codegen import prmt_key_lookup, shared_tables, smem_value_lookup, vector_scales
from kvcompile.lowering.codegen.bit_tricks import multiplied, scaled_by
from kvcompile.lowering.codegen.padding import skip_padding
from kvcompile.lowering.codegen.template_files import joined
from kvcompile.lowering.codegen.template_sizes import GLOBALS as SIZES
from kvcompile.lowering.ops.kept_tokens import RUN

LOG2E = 1.4426950408889634

OPENING = joined(__file__, "operands", "loads", "tables", "scores", "values", "step")
"""Names and macros, for any program over encoded tokens (``lowering.paged`` has another)."""
SUMS = joined(__file__, "sums")
"""What a program does with the tokens that it has found to be its own."""
SOURCE = OPENING + joined(__file__, "kernel") + SUMS

PRINTERS = (
    multiplied, scaled_by, skip_padding, shared_tables.declared, shared_tables.filled, shared_tables.kept, shared_tables.taken,
    shared_tables.plane_bytes, shared_tables.store_planes, prmt_key_lookup.picked, prmt_key_lookup.picked_blocks,
    prmt_key_lookup.picked_names, prmt_key_lookup.picked_column, smem_value_lookup.pair_bytes, smem_value_lookup.fill_pairs,
    smem_value_lookup.looked_up, smem_value_lookup.picked_pairs,
    vector_scales.widened, vector_scales.beside, vector_scales.statistics, vector_scales.by_row,
)

GLOBALS = {**SIZES, **{printer.__name__: printer for printer in PRINTERS}, "LARGEST": prmt_key_lookup.LARGEST, "RUN": RUN}
"""Functions and constants that the template uses while it is rendered, without ``plans``."""
