"""Attention on a CPU: the C++ template."""
