"""Attention in every spelling: products, steps on the scores, softmax."""
