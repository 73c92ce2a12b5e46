"""Masks in every spelling, as limits and expressions over positions."""
