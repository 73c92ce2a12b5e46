"""Rotary embeddings of keys, between their projection and the cache."""
