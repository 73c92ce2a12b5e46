"""Acceptance run: compiled models beside uncompiled ones, step by step, over every axis a user chooses; see benchmarks/ACCEPT.md."""
