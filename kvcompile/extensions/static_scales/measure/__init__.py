"""Measurement of static scales: keys and values observed in graphs without a cache, their magnitudes, and the scales that follow from
these.
"""
