"""Code generation: what the kernel texts of several devices share."""
