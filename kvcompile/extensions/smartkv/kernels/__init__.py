"""The Triton kernels of smartkv. ``smartkv.decode_step`` launches those of its attention over few queries:

    attend_tokens  reads settled tokens bucket by bucket, then entering ones: sums of each split, and each token's scores
    finish         merges the splits into the result, adds up the attention of each token over all heads, and updates the heads' averages

``smartkv.movement`` launches those over all stored tokens:

    say_levels     writes the level of each settled token, by position
    decode_tokens  writes the values of kv heads, by position
    move_tokens    writes codes, scales and positions at the indices that a reallocation assigns

A tile of tokens has one level, so a program of ``attend_tokens`` decodes with constants. A row of a kv head is a query of a query head,
r = s * G + g.
"""

from __future__ import annotations


def bits_of_levels(widths: tuple[int, ...]) -> int:
    """Return the bits of all levels as one kernel constant, four bits for each, the lowest level first."""
    return sum(bits << (4 * level) for level, bits in enumerate(widths))
