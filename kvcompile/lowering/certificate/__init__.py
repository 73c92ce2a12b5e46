"""Certificates of any scheme with a bound: how bounds are printed, put together for a head, reported and counted."""
