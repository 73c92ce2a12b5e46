"""Certified attention: definition, certificate, telemetry, and how its kernels are put together."""
