"""transformers' continuous batching over pools of codes: an attention function, and allocators for the engine's cache."""
