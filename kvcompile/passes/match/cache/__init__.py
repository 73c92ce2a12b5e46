"""Caches in every spelling: their layout, their writes and their reads."""
