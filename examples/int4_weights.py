"""Weights in int8 or int4 by torchao beside an int4 cache: both are compiled into one graph, and neither knows the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from checkpoint import arguments, load
from transformers import StaticCache

import kvcompile


def main(argv: Sequence[str] | None = None) -> None:
    """Quantize the weights, compile with a compressed cache, and print bytes of weights and of the cache."""
    parser = arguments(__doc__, new=32)
    parser.add_argument("--weights", choices=("int8", "int4"), default="int4" if torch.cuda.is_available() else "int8")
    given = parser.parse_args(argv)
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        sys.exit("expected the package torchao, found none: pip install torchao")
    found = load(given.model)
    before = weight_bytes(found.model)
    quantize_(found.model, {"int8": Int8WeightOnlyConfig, "int4": Int4WeightOnlyConfig}[given.weights]())
    backend = kvcompile.backend(given.scheme)
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    ids = found.encode("class Reader:\n    def __init__(self, path):\n")
    cache = StaticCache(found.model.config, max_cache_len=512)
    answer = found.model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)
    print(found.decode(answer[0]))
    print(f"weights: {before:,} bytes, now {weight_bytes(found.model):,}")
    print(backend.report())


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a model's parameters hold, those of quantized ones as they are stored."""
    inner = [part for weight in model.parameters() for part in parts(weight)]
    return sum(part.numel() * part.itemsize for part in inner)


def parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of a parameter, which may be a wrapper around several."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    return [part for name in weight.__tensor_flatten__()[0] for part in parts(getattr(weight, name))]


if __name__ == "__main__":
    main()
