"""Planner: computes the bytes of a model's cache under every scheme, and the largest batch and context for a device; allocates nothing."""
