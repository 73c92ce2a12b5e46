"""Forms: caches at run time, linear (one slot for each position), sliding (the newest tokens only) and paged (read by a block table)."""
