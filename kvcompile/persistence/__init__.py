"""Persistence: caches that are saved to a file, loaded in another process, or shared by several conversations."""
