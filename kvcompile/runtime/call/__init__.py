"""Call: run a compiled graph on caches, from the arguments of a call to the recorded tokens."""
