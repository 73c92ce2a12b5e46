"""Learn the levels and thresholds of the scheme ``beyond`` for a model on its own text, save them, and serve with them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import arguments, load
from tinylm import corpus
from transformers import StaticCache

import kvcompile


def main(argv: Sequence[str] | None = None) -> None:
    """Learn on the first part of a text, validate on the next, and generate with the saved tables."""
    given = arguments(__doc__, steps=20, batch=4, length=256, bits=3, new=32).parse_args(argv)
    found = load(given.model)
    ids = found.encode(corpus.heldout_text().decode(errors="replace"))[0]
    pieces = ids[: (given.steps + 1) * given.batch * given.length].view(-1, given.batch, given.length)
    settings = kvcompile.LearnSettings(steps=given.steps, batch=given.batch, validate_every=max(1, given.steps // 4))
    scheme = kvcompile.learn(
        found.model, pieces[:-1], kvcompile.Beyond(bits=given.bits), validation=pieces[-1:], settings=settings, report=print,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.safetensors"
        kvcompile.save_tables(scheme, path)
        print(f"{path.stat().st_size:,} bytes of tables")
        backend = kvcompile.backend(kvcompile.load_tables(path, found.model))
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    cache = StaticCache(found.model.config, max_cache_len=512)
    answer = found.model.generate(found.encode("def main():\n"), past_key_values=cache, max_new_tokens=given.new, do_sample=False)
    print(found.decode(answer[0]))
    print(backend.report())


if __name__ == "__main__":
    main()
