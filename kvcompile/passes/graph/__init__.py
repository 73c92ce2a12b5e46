"""Graph: facts and tools for any FX graph; nothing here depends on attention."""
