"""The Triton kernels of smartkv. Those of its attention over few queries ``smartkv.decode_step`` puts together:

    attend_tokens  settled tokens bucket by bucket and those that entered, once: sums of a split, and each token's scores
    finish         the result from the splits' sums, what each token got from all heads, and the averages of heads

Those over all stored tokens ``smartkv.movement`` starts:

    say_levels     the level of each token, by position
    decode_tokens  the values of one kv head, by position
    move_tokens    codes, scales and positions in the places that a reallocation gives to them

A tile of tokens has one level, so a program decodes with constants. A row of a kv head is a query of a query head, r = s * G + g.
"""

from __future__ import annotations


def bits_of_levels(widths: tuple[int, ...]) -> int:
    """The bits of each level as a constant of kernels, four bits for each."""
    return sum(bits << (4 * level) for level, bits in enumerate(widths))
