"""Acceptance run: compiled models beside uncompiled ones, step by step, over every axis that a user may choose; see benchmarks/ACCEPT.md."""
