"""transformers' continuous batching over pools of codes: an attention function, and allocators of its cache."""
