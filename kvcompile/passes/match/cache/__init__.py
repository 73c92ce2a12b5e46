"""Caches in every spelling: where an operand is kept, how it is written, how it is read."""
