"""The Triton kernels of certified attention."""
