"""Measurement of static scales: observes keys and values in graphs without a cache, and derives scales from their magnitudes."""
