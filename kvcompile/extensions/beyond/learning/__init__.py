"""Learning of a scheme's tables on a model's loss: quantizers in the graph without a cache, their gradients, the loop, its files."""
