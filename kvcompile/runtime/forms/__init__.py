"""The forms of cache at run time: linear (every position has a place), sliding (the newest tokens only), paged (read by a block table)."""
