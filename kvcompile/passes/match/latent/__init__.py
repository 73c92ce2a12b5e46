"""Keys and values that are made from a cached latent (MLA)."""
