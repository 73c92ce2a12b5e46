"""Rewrite: turn a planned graph into one over the planes of stores."""
