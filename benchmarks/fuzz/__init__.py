"""Fuzz: random programs over a KV cache, each run compiled and plain; none may be silently different, none may fail because of us.

``python -m benchmarks.fuzz --count 1000 --jobs 16`` makes programs from seeds 0, 1, 2, ...; ``README.md`` in this folder tells the rest.
"""
