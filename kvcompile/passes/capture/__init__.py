"""Capture: from Dynamo's graph to an ATen graph with symbolic sizes, normalised to the patterns that the matcher recognises."""
