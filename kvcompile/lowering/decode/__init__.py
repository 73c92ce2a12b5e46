"""Attention of few rows on CUDA: the decode template."""
