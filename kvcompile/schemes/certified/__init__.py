"""certified: the scheme, what its certificates may be, and their bounds."""
