"""Code generation: expressions and tricks that the kernels of several devices share."""
