"""Match: which nodes of a captured graph are attentions over caches, and why others are not."""
