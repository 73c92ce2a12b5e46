"""Attention of many rows on CUDA: the prefill template, and chunks decoded into a scratch."""
