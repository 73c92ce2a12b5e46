"""Certified attention: its definition, and how its kernels are put together."""
