"""Attention of many query rows on CUDA: the prefill template, and chunks of tokens decoded into a scratch buffer."""
