"""The one attend template, from its files: the glossary of its symbols stands at the top of ``operands.jinja``.

Rendered by Inductor (``lower``) and, with stand-ins for Inductor's hooks, by ``offline``.
"""

from __future__ import annotations

from kvcompile.lowering.codegen import paired_values, picked_keys, scale_words, shared_tables
from kvcompile.lowering.codegen.bit_tricks import multiplied, scaled_by
from kvcompile.lowering.codegen.padding import skip_padding
from kvcompile.lowering.codegen.template_files import joined
from kvcompile.lowering.codegen.template_sizes import GLOBALS as SIZES
from kvcompile.lowering.ops.kept_tokens import RUN

LOG2E = 1.4426950408889634

SOURCE = joined(__file__, "operands", "loads", "tables", "scores", "values", "kernel")

PRINTERS = (
    multiplied, scaled_by, skip_padding, shared_tables.declared, shared_tables.filled, shared_tables.kept, shared_tables.taken,
    shared_tables.plane_bytes, shared_tables.store_planes, picked_keys.picked, picked_keys.picked_blocks, picked_keys.picked_names,
    picked_keys.picked_column, paired_values.pair_bytes, paired_values.fill_pairs, paired_values.looked_up, paired_values.picked_pairs,
    scale_words.widened, scale_words.beside, scale_words.statistics, scale_words.by_row,
)

GLOBALS = {**SIZES, **{printer.__name__: printer for printer in PRINTERS}, "LARGEST": picked_keys.LARGEST, "RUN": RUN}
"""What the template calls while it is rendered, but the plans of its slots."""
