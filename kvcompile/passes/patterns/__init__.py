"""One idiom a file: how a cache is written, how attention is spelled, how it is masked."""
