"""Persistence: caches that are saved to a file and loaded in another process, or forked so that several conversations share a prefix."""
