"""The Triton kernels of smartkv's attention over few queries; ``smartkv.decode_step`` puts them together.

    score_keys     keys once, bucket by bucket, then those that entered: each row's scores by position, a maximum and a sum a split
    weigh_values   values once, bucket by bucket, with weights from the scores: a sum a split
    give           what each token got from all heads: the averages in the plane ``importance`` move on
    merge          the result from the splits' sums, and the averages of the heads' measures

A tile of tokens has one width, so a program decodes with constants. A row of a kv head is a query of a query head, r = s * G + g.
Scores are float32 [B, K, T, rows], in units of log2, -inf where a query does not see a token. They lie by position: keys and values of a
token are in different buckets, and to importance it is all one where a token is. Only positions that have a token are written.
"""
