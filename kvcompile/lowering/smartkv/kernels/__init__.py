"""The Triton kernels of smartkv. Those of its attention over few queries ``smartkv.decode_step`` puts together:

    score_keys     keys once, bucket by bucket, then those that entered: each row's scores by position, a maximum and a sum a split
    weigh_values   values once, bucket by bucket, with weights from the scores: a sum a split
    give           what each token got from all heads: the averages in the plane ``importance`` move on
    merge          the result from the splits' sums, and the averages of the heads' measures

Those over all stored tokens ``smartkv.movement`` starts:

    say_widths     the width of each token, by position
    decode_tokens  the values of one kv head, by position
    move_tokens    codes, scales and positions in the places that a reallocation gives to them

A tile of tokens has one width, so a program decodes with constants. A row of a kv head is a query of a query head, r = s * G + g.
Scores are float32 [B, K, T, rows], in units of log2, -inf where a query does not see a token. They lie by position: keys and values of a
token are in different buckets, and to importance it is all one where a token is. Only positions that have a token are written.
"""

from __future__ import annotations

from kvcompile.schemes.smartkv.buckets import Buckets


def shape_of(half: Buckets) -> dict[str, int]:
    """Constants of kernels that go over a half's buckets: kv heads, channels, and the bits of each of up to four buckets."""
    bits = [*half.widths, *[0] * (4 - len(half.widths))]
    return {"K": half.heads, "D": half.head_dim, "WIDTHS": len(half.widths)} | {f"BITS_{number}": each for number, each in enumerate(bits)}
