"""A scheme for every layer: ``sensitivity`` measures what each layer's keys and values lose, ``fit`` chooses within a budget of bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import arguments, dense_bytes, load
from transformers import StaticCache

import kvcompile
from kvcompile.tools.cli.main import main as command

QUICK = ["--context", "128", "--steps", "4", "--rows", "1", "--schemes", "int8,int4"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, fit a policy, and decode with it."""
    parser = arguments(__doc__, context=4096, percent=35, new=32)
    parser.add_argument("--measured", help="a file of kvcompile sensitivity; measured here if there is none")
    parser.add_argument("--quick", action="store_true", help="measure on few and short texts")
    given = parser.parse_args(argv)
    found = load(given.model)
    with tempfile.TemporaryDirectory() as folder:
        measured = given.measured or str(Path(folder) / "sensitivity.json")
        if given.measured is None:
            model = "tinylm" if given.model == parser.get_default("model") else given.model
            command(["sensitivity", model, "-o", measured, *(QUICK if given.quick else [])])
        dense = given.context * dense_bytes(found.model)
        policy = kvcompile.fit(memory=dense * given.percent / 100, sensitivity=measured, context=given.context)
    for glob, pair in policy.rules:
        print(f"{glob:40} {pair.spec() if pair is not None else 'unchanged'}")
    backend = kvcompile.backend(policy)
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    cache = StaticCache(found.model.config, max_cache_len=512)
    ids = found.encode("class Reader:\n    def __init__(self, path):\n")
    answer = found.model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)
    print(found.decode(answer[0]))
    print(backend.report())


if __name__ == "__main__":
    main()
