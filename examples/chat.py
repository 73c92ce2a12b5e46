"""A chat over one compressed cache: each question reads the codes of the whole conversation, and only new tokens are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from checkpoint import arguments, load
from transformers import DynamicCache

import kvcompile

QUESTIONS = ("def open_file(path):\n", "\ndef close_file(handle):\n", "\nclass Reader:\n    def __init__(self, path):\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Answer some questions, or those that are typed, over one growing cache."""
    parser = arguments(__doc__, new=48)
    parser.add_argument("--ask", action="store_true", help="type the questions; an empty line ends")
    given = parser.parse_args(argv)
    found = load(given.model)
    backend = kvcompile.backend(given.scheme)
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    cache, ids = DynamicCache(config=found.model.config), found.encode("")[:, :0]
    for question in iter(input, "") if given.ask else QUESTIONS:
        asked = found.encode(question)
        ids = torch.cat([ids, asked[:, 1:] if ids.shape[1] and asked.shape[1] > 1 and asked[0, 0] == ids[0, 0] else asked], 1)
        started, before = time.perf_counter(), cache.get_seq_length()
        answer = found.model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)
        print(f"> {question.strip()}\n{found.decode(answer[0, ids.shape[1] :])}")
        print(f"[{answer.shape[1] - before} new tokens over {before} in the cache, {time.perf_counter() - started:.1f} s]\n")
        ids = answer
    print(backend.report())


if __name__ == "__main__":
    main()
