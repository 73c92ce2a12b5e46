"""A plugin for vLLM: attention over blocks of codes, in the memory that vLLM allocates and shares."""
