"""Call: a compiled graph bound to caches, from the arguments of a call to tokens that are counted."""
