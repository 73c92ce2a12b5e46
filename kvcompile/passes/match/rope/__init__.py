"""Rotary embeddings between a projection and the cache."""
