"""C++ text of ``kvcompile::attend``, equal for every scheme, in files; a file uses only those before it.

One task is (batch row, kv head, block of queries, split of the tokens). Its rows are the queries of the
block times the G heads that share the kv head, so that a tile of TILE tokens is decoded to float scratch
(cache sized, once) for all of them: keys -> scores -> online softmax -> values into the same scratch ->
weighted sums. A scale of a whole token is not applied to the tile: it multiplies the scores (keys) or the
weights (values); a scale of a group is applied while decoding. Tokens that no row of the block attends to
are neither decoded nor multiplied, so their content (NaN, garbage) cannot matter.

Rows [M] = query-in-block * G + g;  row floats of a side: ``Side::row`` (parts planar, padded to N lanes).

Threads take tasks from one counter. If there are fewer (batch row, kv head, block of queries) than the threads
can use, the tokens are split too and merged by log-sum-exp.
"""

from __future__ import annotations

from kvcompile.lowering.codegen.template_files import joined

VECTORS = joined(__file__, "vectors")
"""Vectors of words and floats; needs <ATen/cpu/vec/vec.h>. Must precede every ``side_source``."""

BLOCKS = joined(__file__, "blocks")
"""Products of a block of rows with a decoded tile; needs VECTORS, Key, Value and TILE."""

DECODE = joined(__file__, "decode")
"""Decoding of planes to a tile of floats; needs VECTORS."""

FUSED = joined(__file__, "fused")
"""Products of a few rows with codes that are decoded in registers; needs BLOCKS and DECODE."""

MATRIX = joined(__file__, "matrix")
"""Products of many bfloat16 rows; needs BLOCKS, DECODE and Q."""

ATTEND = joined(__file__, "attend")
"""One task: masks and the online softmax over its tiles; needs VECTORS, Key, Value, BLOCKS and DECODE."""

RUN = joined(__file__, "run")
"""All tasks and the log-sum-exp merge; needs ATTEND."""

ENTRY = joined(__file__, "entry")
"""The whole module; ``lower.AttendTemplate.render`` fills every jinja variable."""
