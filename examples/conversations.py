"""Several conversations from one compiled model: each has its cache, they take turns, and nothing is compiled for a second one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from checkpoint import arguments, load
from transformers import StaticCache

import kvcompile

OPENINGS = ("class Reader:\n    def __init__(self, path):\n", "def main():\n    parser = ArgumentParser()\n", "import os\nimport sys\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Let some conversations write a few tokens in turn, and print how many graphs that took."""
    given = arguments(__doc__, turns=3, new=12).parse_args(argv)
    found = load(given.model)
    backend = kvcompile.backend(given.scheme)
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    talks = [(StaticCache(found.model.config, max_cache_len=256), found.encode(text)) for text in OPENINGS]
    graphs: list[int] = []
    for _ in range(given.turns):
        talks = [
            (cache, found.model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)) for cache, ids in talks
        ]
        graphs.append(len(backend.graphs))
    for _, ids in talks:
        print(f"{found.decode(ids[0])}\n{'-' * 40}")
    print(f"graphs after each turn: {graphs}")
    print(backend.report())


if __name__ == "__main__":
    main()
