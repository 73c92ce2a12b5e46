"""Rewrite: a planned graph becomes one over a store's planes."""
