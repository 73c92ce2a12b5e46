"""Planner: the bytes of a model's cache under every scheme, and what of them fits on a device; nothing is allocated and nothing runs."""
