"""Static scales: eight-bit codes whose scales were measured beforehand: of each layer, for keys and for values, per
tensor or per kv head.
"""
