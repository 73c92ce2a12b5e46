"""Plan: which scheme each slot of a matched graph gets."""
