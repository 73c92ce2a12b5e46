"""Cached attentions whose keys are rotated by their position: every way to spell that we could think of.

``TURNS`` maps a name to a function (module, x [B, S, heads, D], pos) that rotates; the module caches what comes out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_models import Attention, Case, buffers, by_offset, by_position, visible
from torch import nn

Turn = Callable[["Rotating", torch.Tensor, torch.Tensor], torch.Tensor]


class Rotating(Attention):
    """An index_copy_ cache of (B, H, C, D) whose queries and keys go through ``turn``."""

    def __init__(self, turn: Turn, theta: float = 100.0, **sizes: int) -> None:
        super().__init__(**{"kv": 2, **sizes})
        buffers(self, self.batch, self.kv, self.capacity, self.dim)
        self.turn = turn
        self.norm = nn.RMSNorm(self.dim)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        frequencies = theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.outer(torch.arange(self.capacity).float(), frequencies)
        self.register_buffer("frequencies", frequencies)
        self.register_buffer("cosines", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sines", torch.cat([angles, angles], -1).sin())
        self.register_buffer("packed", torch.stack([angles.cos(), angles.sin()], -1))
        # No buffer: those lose their imaginary part when a module is given another dtype.
        self.circle = torch.polar(torch.ones_like(angles), angles)

    def rotated(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [B, heads, S, D]."""
        q, k, v = self.project(x)
        q, k = (self.turn(self, item, pos).to(x.dtype) for item in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.rotated(x, pos)
        keys, values = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity), enable_gqa=True))


class RotatingByOffset(Rotating):
    """Positions are a Python int: tables and cache are sliced by it."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        count = x.shape[1]
        q, k, v = self.project(x)
        part = self.circle[start : start + count]
        q, k = (turn_complex(item, part[:, None, :]).transpose(1, 2) for item in (q, k))
        self.k_cache.narrow(2, start, count).copy_(k)
        self.v_cache.narrow(2, start, count).copy_(v.transpose(1, 2))
        keys, values = self.k_cache[:, :, : start + count], self.v_cache[:, :, : start + count]
        mask = torch.ones(count, start + count, dtype=torch.bool).tril(diagonal=start)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True))


class RotatingConcat(Rotating):
    """The cache is concatenated and returned."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, object]:
        before = 0 if past is None else past[0].shape[2]
        q, k, v = self.rotated(x, torch.arange(before, before + x.shape[1]))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = torch.arange(k.shape[2]) <= torch.arange(before, before + x.shape[1])[:, None]
        return self.close(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)), (k, v)


def angles(m: Rotating, pos: torch.Tensor) -> torch.Tensor:
    """[S, 1, D / 2]."""
    return (pos[:, None].float() * m.frequencies)[:, None]


def half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def pair_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def turn_complex(x: torch.Tensor, circle: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * circle).flatten(-2).type_as(x)


def halves(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    angle = torch.cat([angles(m, pos)] * 2, -1)
    return x * angle.cos() + half_turned(x) * angle.sin()


def halves_apart(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    cos, sin = angles(m, pos).cos(), angles(m, pos).sin()
    first, second = x[..., : m.dim // 2], x[..., m.dim // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def backwards(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    cos, sin = angles(m, pos).cos(), angles(m, pos).sin()
    first, second = x.split(m.dim // 2, -1)
    return torch.cat([cos * first + sin * second, cos * second - sin * first], -1)


def pairs(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    angle = angles(m, pos).repeat_interleave(2, -1)
    return (x.float() * angle.cos() + pair_turned(x).float() * angle.sin()).to(x.dtype)


def pairs_apart(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    cos, sin = angles(m, pos).cos(), angles(m, pos).sin()
    return torch.stack([x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin], -1).flatten(-2)


def complex_table(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return turn_complex(x, m.circle[pos].view(1, -1, 1, m.dim // 2))


def complex_made(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    angle = torch.outer(pos.float(), m.frequencies)
    return turn_complex(x, torch.polar(torch.ones_like(angle), angle)[:, None])


def complex_joined(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    angle = torch.outer(pos.float(), m.frequencies)
    return turn_complex(x, torch.view_as_complex(torch.stack([angle.cos(), angle.sin()], -1))[:, None])


def packed_table(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    cos, sin = m.packed[pos][:, None].unbind(-1)
    x = x.float().reshape(*x.shape[:-1], -1, 2)
    turned = torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 1] * cos + x[..., 0] * sin], -1)
    return turned.flatten(3)


def two_tables(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x * F.embedding(pos, m.cosines)[:, None], half_turned(x), m.sines.index_select(0, pos).unsqueeze(1))


def partial(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    turned, rest = x[..., : m.dim // 2], x[..., m.dim // 2 :]
    angle = torch.einsum("s,d->sd", pos.float(), m.frequencies[: m.dim // 4])[:, None]
    angle = torch.cat([angle, angle], -1)
    return torch.cat([turned * angle.cos() + half_turned(turned) * angle.sin(), rest], -1)


def two_channels(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    frequency = 1.0 / (50.0 ** (torch.arange(0, 2, 2).float() / 2))
    angle = torch.cat([pos.float().unsqueeze(-1) * frequency] * 2, -1)[:, None]
    return torch.cat([x[..., :2] * angle.cos() + half_turned(x[..., :2]) * angle.sin(), x[..., 2:]], -1)


def scaled(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    # Frequencies made in the graph, stretched where they are slow, and both tables larger than one.
    frequency = 1.0 / (50.0 ** (torch.arange(0, m.dim, 2).float() / m.dim))
    angle = torch.cat([pos.float().unsqueeze(-1) * frequency / 4.0] * 2, -1)[:, None]
    return x * (angle.cos() * 1.25) + half_turned(x) * (angle.sin() * 1.25)


def normed(m: Rotating, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return halves(m, m.norm(x), pos)


TURNS: dict[str, Turn] = {
    turn.__name__: turn
    for turn in (
        halves, halves_apart, backwards, pairs, pairs_apart, complex_table, complex_made, complex_joined, packed_table, two_tables,
        partial, two_channels, scaled, normed,
    )
}
INTERLEAVED = {"pairs", "pairs_apart", "complex_table", "complex_made", "complex_joined", "packed_table"}

ROPE_CASES = (
    *(Case(name, lambda turn=turn, **sizes: Rotating(turn, **sizes), by_position) for name, turn in TURNS.items()),
    Case("sliced-table", lambda **sizes: RotatingByOffset(complex_table, **sizes), by_offset),
)
