"""Planner: computes the bytes of a model's cache under every scheme and what fits on a device, without allocating or running anything."""
