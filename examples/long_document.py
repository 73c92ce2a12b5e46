"""Questions about one long document: its compressed cache is computed once, saved to disk, loaded, and copied for every question."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import arguments, dense_bytes, load
from tinylm import corpus
from transformers import DynamicCache

import kvcompile

QUESTIONS = ("\nclass Server:\n", "\ndef main():\n", "\nasync def connect(host, port):\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Prefill a document, save its cache, and answer questions from copies of what was loaded."""
    given = arguments(__doc__, tokens=1024, new=32).parse_args(argv)
    found = load(given.model)
    found.model.forward = torch.compile(found.model.forward, backend=kvcompile.backend(given.scheme))
    document = found.encode(corpus.heldout_text().decode(errors="replace")[: 8 * given.tokens])[:, : given.tokens]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        started, prefix = time.perf_counter(), DynamicCache(config=found.model.config)
        found.model(input_ids=document, past_key_values=prefix)
        print(f"{document.shape[1]} tokens in {time.perf_counter() - started:.1f} s, compiling included")
        path = Path(folder) / "document.pt"
        torch.save(prefix, path)
        dense = document.shape[1] * dense_bytes(found.model)
        print(f"saved: {path.stat().st_size:,} bytes; keys and values in {found.model.dtype} would be {dense:,}")
        prefix = torch.load(path, weights_only=False)
        for question in QUESTIONS:
            asked = found.encode(question)
            asked = asked[:, 1:] if asked[0, 0] == document[0, 0] else asked
            started, ids = time.perf_counter(), torch.cat([document, asked], 1)
            answer = found.model.generate(ids, past_key_values=copy.deepcopy(prefix), max_new_tokens=given.new, do_sample=False)
            print(f"> {question.strip()}\n{found.decode(answer[0, ids.shape[1] :])}\n[{time.perf_counter() - started:.1f} s]\n")


if __name__ == "__main__":
    main()
