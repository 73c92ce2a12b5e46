"""The Triton kernels of smartkv. ``smartkv.decode_step`` launches those of its attention over few queries:

    attend_tokens  reads settled tokens bucket by bucket, then entering ones: sums of each split, and each token's scores
    finish         merges the splits into the result, adds up the attention of each token over all heads, and updates the heads' averages

``smartkv.movement`` launches those over all stored tokens:

    say_levels     writes the level of each settled token, by position
    decode_tokens  writes the values of kv heads, by position
    move_tokens    writes codes, scales and positions at the indices that a reallocation assigns

A tile of tokens has one level, so a program of ``attend_tokens`` decodes with constants. A row of a kv head is a query of a query head,
r = s * G + g.

Names that the kernels share. CODES, SCALES: planes of entering tokens. ENDS, SETTLED_SCALES, WHERE, POOL, MEAN, FIRST: the planes ``ends``,
``scales``, ``where``, ``pool``, ``mean`` and ``first`` of ``buckets``. ``first``: the settled tokens of a batch row, FIRST's content;
``b``, ``k``: batch row and kv head; ``pages``, ``rows``: pages of entering tokens, batch rows. K, G, S, D: kv heads, query heads of each,
queries, channels. C: channels of a run, an eighth of D; COLUMNS, R: powers of two from C and from G * S on. LEVELS: levels; BITS,
VALUE_BITS: four bits for the width of each (``bits_of_levels``). SPLITS: splits of a batch row's tokens. DOT: dtype in which products are
computed; PACKED: codes are decoded two words at a time (``bit_fields``), not in the interpreter. TURNED, IN_FRAME: narrow keys are rotated.
HAS_LO, HAS_KEEP, HAS_SINKS: whether the operand is given.
"""

from __future__ import annotations


def bits_of_levels(widths: tuple[int, ...]) -> int:
    """Return the bits of all levels as one kernel constant, four bits for each, the lowest level first."""
    return sum(bits << (4 * level) for level, bits in enumerate(widths))
