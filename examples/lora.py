"""A LoRA adapter beside a compressed cache: peft wraps the projections, and the attention behind them is rewritten as before."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from checkpoint import arguments, load
from transformers import StaticCache

import kvcompile


def main(argv: Sequence[str] | None = None) -> None:
    """Add an adapter of random weights, generate with it and without it, and print the report."""
    given = arguments(__doc__, rank=8, new=24).parse_args(argv)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        sys.exit("expected the package peft, found none: pip install peft")
    found = load(given.model)
    torch.manual_seed(0)
    model = get_peft_model(found.model, LoraConfig(r=given.rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    backend = kvcompile.backend(given.scheme)
    inner = model.get_base_model()
    inner.forward = torch.compile(inner.forward, backend=backend)
    ids = found.encode("class Reader:\n    def __init__(self, path):\n")

    def written() -> str:
        cache = StaticCache(inner.config, max_cache_len=256)
        return found.decode(model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)[0])

    print(f"with the adapter:\n{written()}\n")
    with model.disable_adapter():
        print(f"without it:\n{written()}\n")
    print(backend.report())


if __name__ == "__main__":
    main()
