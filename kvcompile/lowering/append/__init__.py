"""Writes of new tokens into planes on CUDA."""
