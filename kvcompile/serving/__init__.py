"""Paged pools of codes for serving engines: the layout of a block, the pool, its operations, and adapters for engines."""

from kvcompile.serving.continuous_batching.installation import install, remove

__all__ = ["install", "remove"]
