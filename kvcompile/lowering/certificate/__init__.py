"""Certificates of any scheme with a bound: printing bounds, combining them for a head, reports and telemetry."""
