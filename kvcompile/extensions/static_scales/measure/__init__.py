"""Static scales measured on a model: keys and values observed in cache-less graphs, magnitudes of them, and the scales that follow."""
