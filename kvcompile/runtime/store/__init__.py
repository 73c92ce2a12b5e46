"""Store: compressed tokens in memory, what a cache knows of them, and the caches that live."""
