"""Attention on a CPU: an Inductor C++ template."""
