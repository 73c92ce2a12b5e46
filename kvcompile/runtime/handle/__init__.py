"""Handle: the tensor that a caller holds in place of a cache, and what code that is not compiled does to it."""
