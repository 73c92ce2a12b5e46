"""Certified decoding: every step returns a bound on its attention's error, falls back where the bound is too large, and is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from checkpoint import arguments, load
from transformers import StaticCache

import kvcompile


def main(argv: Sequence[str] | None = None) -> None:
    """Generate with the scheme ``certified``, and print its telemetry and the worst head of the last step."""
    parser = arguments(__doc__, new=32)
    parser.set_defaults(scheme="certified")
    parser.add_argument("--tolerance", type=float, default=0.05, help="the value bound above which a head reads originals (default: 0.05)")
    given = parser.parse_args(argv)
    found = load(given.model)
    backend = kvcompile.backend(given.scheme, certify=kvcompile.Certify(v_tol=given.tolerance))
    found.model.forward = torch.compile(found.model.forward, backend=backend)
    ids = found.encode("class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n")
    cache = StaticCache(found.model.config, max_cache_len=ids.shape[1] + given.new)
    answer = found.model.generate(ids, past_key_values=cache, max_new_tokens=given.new, do_sample=False)
    print(found.decode(answer[0]))
    print(backend.telemetry())
    worst = max(backend.certificates(), key=lambda item: item.bound)
    print(f"largest bound of the last step: {worst.bound:.4f}, {worst.path}, head {worst.head}, {worst.rung.name.lower()}")


if __name__ == "__main__":
    main()
