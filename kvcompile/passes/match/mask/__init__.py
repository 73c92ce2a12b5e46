"""Masks in every spelling, as limits on positions and as expressions."""
