"""Kernels over the blocks of a pool: rows of blocks attended to, and tokens appended by slots."""
