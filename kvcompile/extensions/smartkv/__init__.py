"""smartkv: bits by attention, token by token ("SmartKV", sections 2 to 6, 9, 10.1, 10.2 and 10.6), its mathematics on tensors.

    attention's mass -> importance -> allocation (budget, hysteresis, clock) -> bits of every token -> codes

``codes``         2, 3, 4 or 8 bits a channel, one scale a token and head
``importance``    what attention gave to a token, averaged over steps, heads and layers
``budget``        what a token costs at each width, and what may be spent
``allocation``    the widths that are worth most of all that fit
``hysteresis``    which tokens may change their width at all
``clock``         when to allocate again
``buckets``       the stored tokens of a layer's keys or values, those of equal width together
``moves``         tokens go to the buckets of their new widths
``originals``     tier 2: codes of a token whose width changes come from its original
``rules``         what reallocation asks of the scheme
``reallocation``  importance becomes new widths, and new buckets
``scheme``        the scheme: options, layout, and what the runtime asks of it

Everything but the scheme is a pure function on tensors of one layer, on any device. ``docs/extensions/SMARTKV.md`` has what is missing.
"""
