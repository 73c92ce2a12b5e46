"""Graph: what every pass asks of an FX graph; knows no attention."""
