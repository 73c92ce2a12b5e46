"""Attention of few query rows on CUDA: the decode template."""
