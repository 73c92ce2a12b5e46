"""smartkv: each token's width follows its attention ("SmartKV", sections 2 to 6, 9, 10.1, 10.2 and 10.6); its mathematics on tensors.

    attention weights -> importance -> allocation (budget, hysteresis, clock) -> width of every token -> codes

``codes``         codes of 2, 3, 4 or 8 bits per channel, one scale per token and head
``importance``    the attention that a token received, averaged over steps, heads and layers
``budget``        the bytes of a token at each width, and the bytes that a layer may take
``allocation``    the widths of largest total utility that fit the budget
``hysteresis``    the tokens whose width may change at an allocation
``clock``         the steps at which a layer allocates again
``buckets``       the stored tokens of a layer's keys or values, grouped by width
``moves``         re-encoding of tokens into the buckets of their new widths
``originals``     tier 2: a token that changes width is encoded from its full-precision copy
``rules``         the scheme's options that reallocation reads
``reallocation``  from importance to new widths, and from new widths to new buckets
``scheme``        the scheme: options, layout, and the runtime's hooks

All modules but the scheme are pure functions on tensors of one layer, on any device. ``docs/extensions/SMARTKV.md`` lists what is missing.
"""
