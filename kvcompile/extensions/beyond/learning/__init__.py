"""Learning of a scheme's tables on a model's loss: the quantizer in the cache-less graph, its gradients, the loop, and what it leaves."""
