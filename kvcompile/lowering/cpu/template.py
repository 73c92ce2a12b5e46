"""C++ text of ``kvcompile::attend``, the same for every scheme, in files that stand in the order in which they need each other.

One task is (batch row, kv head, block of queries, split of the tokens). Its rows are the queries of the
block times the G heads that share the kv head, so that a tile of TILE tokens is decoded to float scratch
(cache sized, once) for all of them: keys -> scores -> online softmax -> values into the same scratch ->
weighted sums. A scale of a whole token never touches the tile: it multiplies the scores (keys) or the
weights (values); a scale of a group is applied while decoding. Tokens no row of the block attends to are
neither decoded nor multiplied, so what lies there (NaN, garbage) cannot matter.

Rows [M] = query-in-block * G + g;  row floats of a side: ``Side::row`` (parts planar, padded to N lanes).

Threads take tasks from one counter. Where (batch row, kv head, block of queries) are fewer than the threads
can use, the tokens are split too and merged by log-sum-exp.
"""

from __future__ import annotations

from kvcompile.lowering.codegen.template_files import joined

VECTORS = joined(__file__, "vectors")
"""Vector words; needs <ATen/cpu/vec/vec.h>. Stands before every ``side_source``."""

BLOCKS = joined(__file__, "blocks")
"""Products of a block of rows with a decoded tile; needs VECTORS, Key, Value and TILE."""

DECODE = joined(__file__, "decode")
"""From planes to a tile of floats; needs VECTORS."""

FUSED = joined(__file__, "fused")
"""Products straight from the planes for a few rows; needs BLOCKS and DECODE."""

MATRIX = joined(__file__, "matrix")
"""Products of many bfloat16 rows; needs BLOCKS, DECODE and Q."""

ATTEND = joined(__file__, "attend")
"""One task, that is masks and the online softmax over its tiles; needs VECTORS, Key, Value, BLOCKS and DECODE."""

RUN = joined(__file__, "run")
"""All tasks and the log-sum-exp merge; needs ATTEND."""

ENTRY = joined(__file__, "entry")
"""The module; every jinja variable is filled by ``lower.AttendTemplate.render``."""
