"""A custom attention module with a cache of its own: one line compresses it, and ``explain`` says what became of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from checkpoint import arguments
from torch import nn

import kvcompile


class Attention(nn.Module):
    """Softmax attention with grouped queries over buffers [B, K, T, D] that it writes by itself; x: [B, S, C]."""

    def __init__(self, channels: int = 256, heads: int = 8, kv_heads: int = 2, length: int = 1024) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, channels // heads
        self.to_q, self.to_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.to_kv = nn.Linear(channels, 2 * kv_heads * self.dim)
        self.register_buffer("past_k", torch.zeros(1, kv_heads, length, self.dim))
        self.register_buffer("past_v", torch.zeros(1, kv_heads, length, self.dim))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention of x [B, S, C] at positions [S], over all tokens written up to them."""
        q = self.to_q(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k, v = (part.unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2) for part in self.to_kv(x).chunk(2, -1))
        self.past_k[:, :, positions] = k
        self.past_v[:, :, positions] = v
        group = self.heads // self.kv_heads
        scores = q @ self.past_k.repeat_interleave(group, 1).transpose(-1, -2) * self.dim**-0.5
        hidden = torch.arange(self.past_k.shape[2], device=x.device) > positions[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.to_out((weights @ self.past_v.repeat_interleave(group, 1)).transpose(1, 2).flatten(2))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a prompt and some steps beside the module as it is, and print the report."""
    given = arguments(__doc__, steps=16).parse_args(argv)
    torch.manual_seed(0)
    stock = Attention().eval()
    own = Attention().eval()
    own.load_state_dict(stock.state_dict())

    backend = kvcompile.backend(given.scheme)
    compiled = torch.compile(own, backend=backend)      # the one line

    x = torch.randn(1, 64 + given.steps, 256)
    pieces = [range(64), *([at] for at in range(64, 64 + given.steps))]
    with torch.no_grad():
        for piece in pieces:
            at = torch.tensor(list(piece))
            expected, result = stock(x[:, at], at), compiled(x[:, at], at)
    print(f"last step: off by {float((result - expected).norm() / expected.norm()):.4f} of its length")
    print(backend.report())
    print(kvcompile.explain(own, (x[:, :1], torch.tensor([0])), given.scheme))


if __name__ == "__main__":
    main()
