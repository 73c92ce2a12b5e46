"""Plan: choose a scheme for each slot of a matched graph."""
