"""Hand-written attentions over cached latents: the ways to project, to put keys together and to hold the parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_models import CAPACITY, Attention, Case, buffers, by_offset, by_position, returned, visible
from torch import nn

RANK, ROTARY, NOPE, VALUE = 24, 8, 16, 12


class Latent(Attention):
    """A latent of 24 channels and a rotary part of 8 that all heads share; keys of 16 + 8 channels, values of 12."""

    def __init__(self, batch: int = 2, heads: int = 4, capacity: int = CAPACITY, rank: int = RANK, bias: bool = False) -> None:
        super().__init__(batch=batch, heads=heads, kv=heads, dim=NOPE + ROTARY, capacity=capacity)
        self.rank = rank
        self.down = nn.Linear(self.width, rank + ROTARY, bias=False)
        self.norm = nn.LayerNorm(rank)
        self.up = nn.Linear(rank, heads * (NOPE + VALUE), bias=bias)
        self.out = nn.Linear(heads * VALUE, self.width, bias=False)

    def parts(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, H, S, 16] and [B, H, S, 8], the latent [B, S, 24], the rotated part [B, S, 8]."""
        q = self.q(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([NOPE, ROTARY], dim=-1)
        latent, rope = self.down(x).split([self.rank, ROTARY], dim=-1)
        return q_nope, self.rotate(q_rope, pos), self.norm(latent), self.rotate(rope, pos)

    @staticmethod
    def rotate(x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """RoPE along the last dim."""
        angle = pos[:, None] * 100.0 ** -torch.arange(0, 1, 2 / x.shape[-1], device=x.device)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def expand(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, H, T, 24] and values [B, H, T, 12]."""
        made = self.up(latent).view(*latent.shape[:2], self.heads, -1).transpose(1, 2)
        nope, values = made.split([NOPE, VALUE], dim=-1)
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1), values

    def finish(self, y_BHSD: torch.Tensor) -> torch.Tensor:
        """Back to [B, S, width]."""
        return self.out(y_BHSD.transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """SDPA over the whole buffer."""
        return self.finish(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, keys.shape[2])))


class TwoBuffers(Latent):
    """Latent and rotary part in buffers of their own, keys by cat."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, self.rank, names=("latents",))
        buffers(self, self.batch, self.capacity, ROTARY, names=("ropes",))

    def write(self, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> None:
        """The plain write."""
        self.latents.index_copy_(1, pos, latent)
        self.ropes.index_copy_(1, pos, rope)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.write(latent, rope, pos)
        return self.attend(torch.cat([q_nope, q_rope], -1), *self.expand(self.latents, self.ropes), pos)


class Filled(TwoBuffers):
    """Keys put together by two writes into an empty tensor, the rotary part first."""

    def expand(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.up(latent).view(*latent.shape[:2], self.heads, -1).transpose(1, 2)
        keys = made.new_empty(*made.shape[:3], NOPE + ROTARY)
        keys[..., :ROTARY] = rope.unsqueeze(1)
        keys[..., ROTARY:].copy_(made[..., VALUE:])
        return keys, made[..., :VALUE]

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.write(latent, rope, pos)
        return self.attend(torch.cat([q_rope, q_nope], -1), *self.expand(self.latents, self.ropes), pos)


class FilledButForOne(TwoBuffers):
    """Keys put together by two writes into an empty tensor: the last rotary channel, then all channels ahead of it."""

    def expand(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, values = super().expand(latent, rope)
        keys = made.new_empty(made.shape)
        keys[..., -1:] = made[..., -1:]
        keys[..., :-1] = made[..., :-1]
        return keys, values


class OneBuffer(Latent):
    """Latent and rotary part side by side in one buffer, written by slices; matmul, softmax, matmul."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.capacity, self.rank + ROTARY, names=("cache",))

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        pos = torch.arange(start, start + x.shape[1])
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.cache[:, start : start + x.shape[1]] = torch.cat([latent, rope], -1)
        seen = self.cache[:, : start + x.shape[1]]
        keys, values = self.expand(*seen.split([self.rank, ROTARY], dim=-1))
        scores = torch.cat([q_nope, q_rope], -1) @ keys.mT / math.sqrt(NOPE + ROTARY)
        scores = scores.masked_fill(~visible(pos, seen.shape[1]), float("-inf"))
        return self.finish(scores.softmax(-1) @ values)


class OneBufferAbsorbed(OneBuffer):
    """The projections moved to queries and result by the author: keys are the cache, values its first channels."""

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        pos = torch.arange(start, start + x.shape[1])
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.cache[:, start : start + x.shape[1]] = torch.cat([latent, rope], -1)
        seen = self.cache[:, : start + x.shape[1]].unsqueeze(1)
        by_head = self.up.weight.view(self.heads, NOPE + VALUE, self.rank)
        q = torch.cat([torch.einsum("bhsd,hdr->bhsr", q_nope, by_head[:, :NOPE]), q_rope], -1)
        scale = 1 / math.sqrt(NOPE + ROTARY)
        y = F.scaled_dot_product_attention(
            q, seen.expand(-1, self.heads, -1, -1), seen[..., : self.rank].expand(-1, self.heads, -1, -1),
            attn_mask=visible(pos, seen.shape[2]), scale=scale,
        )
        return self.finish(torch.einsum("bhsr,hdr->bhsd", y, by_head[:, NOPE:]))


class TwoProducts(TwoBuffers):
    """Absorbed by the author, with the scores of latent and rotary part added: two products, two caches, the latent as values."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = (item.transpose(1, 2) if item.dim() == 4 else item for item in self.parts(x, pos))
        self.write(latent, rope, pos)
        by_head = self.up.weight.view(self.heads, NOPE + VALUE, self.rank)
        q = torch.einsum("bshd,hdr->bshr", q_nope, by_head[:, :NOPE])
        scores = torch.einsum("bshr,btr->bsht", q, self.latents) + torch.einsum("bshc,btc->bsht", q_rope, self.ropes)
        scores = scores * (NOPE + ROTARY) ** -0.5
        scores = scores + torch.where(visible(pos, self.capacity), 0.0, float("-inf"))[:, None]
        y = torch.einsum("bsht,btr->bshr", scores.softmax(-1), self.latents)
        return self.finish(torch.einsum("bshr,hdr->bhsd", y, by_head[:, NOPE:]))


class KeysAreValues(Attention):
    """Values are the cached keys."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.capacity, self.dim, names=("cache",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, _ = (item.transpose(1, 2) for item in self.project(x))
        self.cache[:, :, pos] = k
        y = F.scaled_dot_product_attention(q, self.cache, self.cache, attn_mask=visible(pos, self.capacity), enable_gqa=True)
        return self.close(y)


class RelativeScores(KeysAreValues):
    """A second product that is no product with cached keys: it stays what is added to the scores."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.places = nn.Parameter(torch.randn(self.batch, self.heads, self.capacity, self.dim) / 5)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, _ = (item.transpose(1, 2) for item in self.project(x))
        self.cache[:, :, pos] = k
        keys = self.cache.repeat_interleave(self.heads // self.kv, 1)
        scores = (q @ keys.mT + q @ self.places.mT) * 0.3
        return self.close(scores.masked_fill(~visible(pos, self.capacity), float("-inf")).softmax(-1) @ keys)


class Einsums(Latent):
    """No rotary part: keys and values by two einsums of one latent, whose weights are [H, r, D] and [D, H, r]."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.to_keys = nn.Parameter(torch.randn(self.heads, self.rank, NOPE + ROTARY) / 5)
        self.to_values = nn.Parameter(torch.randn(VALUE, self.heads, self.rank) / 5)
        buffers(self, self.batch, self.capacity, self.rank, names=("latents",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, _ = self.parts(x, pos)
        self.latents[:, pos] = latent
        keys = torch.einsum("btr,hrd->bhtd", self.latents, self.to_keys) * 0.5
        values = torch.einsum("btr,dhr->bhtd", self.latents, self.to_values)
        return self.attend(torch.cat([q_nope, q_rope], -1), keys, values, pos)


class Grouped(Latent):
    """Half as many key and value heads as query heads, by matmuls with transposed weights; ``enable_gqa``."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.kv_heads = self.heads // 2
        self.to_keys = nn.Parameter(torch.randn(self.rank, self.kv_heads * NOPE) / 5)
        self.to_values = nn.Parameter(torch.randn(self.kv_heads, self.rank, VALUE) / 5)
        buffers(self, self.batch, 1, self.capacity, self.rank, names=("latents",))
        buffers(self, self.batch, 1, self.capacity, ROTARY, names=("ropes",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.latents.index_copy_(2, pos, latent.unsqueeze(1))
        self.ropes.index_copy_(2, pos, rope.unsqueeze(1))
        nope = (self.latents.squeeze(1) @ self.to_keys).view(self.batch, self.capacity, self.kv_heads, NOPE).transpose(1, 2)
        keys = torch.cat([nope, self.ropes.expand(-1, self.kv_heads, -1, -1)], -1)
        values = self.latents @ self.to_values
        y = F.scaled_dot_product_attention(
            torch.cat([q_nope, q_rope], -1), keys, values, attn_mask=visible(pos, self.capacity), enable_gqa=True
        )
        return self.finish(y)


class Grown(Latent):
    """Latents and rotary parts that are concatenated and returned; a causal flag on the first call."""

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        start = 0 if past is None else past[0].shape[1]
        pos = torch.arange(start, start + x.shape[1])
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        if past is not None:
            latent, rope = torch.cat([past[0], latent], 1), torch.cat([past[1], rope], 1)
        return self.attend(torch.cat([q_nope, q_rope], -1), *self.expand(latent, rope), pos), (latent, rope)


class Rolled(Latent):
    """Latents and rotary parts of the newest tokens only: the oldest are moved out at every call."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{**sizes, "capacity": 12})
        buffers(self, self.batch, self.capacity, self.rank, names=("latents",))
        buffers(self, self.batch, self.capacity, ROTARY, names=("ropes",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        count = x.shape[1]
        q_nope, q_rope, *new = self.parts(x, pos)
        for cache, part in zip((self.latents, self.ropes), new, strict=True):
            cache.copy_(torch.cat([cache[:, count:], part], 1))
        # The age of every place, and of every query, counted from the newest token.
        age, own = self.capacity - 1 - torch.arange(self.capacity), count - 1 - torch.arange(count)
        seen = (age >= own[:, None]) & (age <= pos[-1])
        keys, values = self.expand(self.latents, self.ropes)
        return self.finish(F.scaled_dot_product_attention(torch.cat([q_nope, q_rope], -1), keys, values, attn_mask=seen))


class Read(TwoBuffers):
    """What a test reads or changes in addition: ``use(module, q, latent, rope, pos)`` gives the result."""

    def __init__(self, use: Callable[..., torch.Tensor], **sizes: int) -> None:
        super().__init__(**sizes)
        self.use = use

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        self.write(latent, rope, pos)
        return self.use(self, torch.cat([q_nope, q_rope], -1), self.latents, self.ropes, pos)


def biased(**sizes: int) -> nn.Module:
    """A projection with a bias."""
    return TwoBuffers(bias=True, **sizes)  # type: ignore[arg-type]


def read(name: str, use: Callable[..., torch.Tensor], refused: str) -> Case:
    """A case that differs in what is done with the cached latents."""
    return Case(name, lambda **sizes: Read(use, **sizes), by_position, refused)


def _normed(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return m.attend(q, *m.expand(m.norm(latent), rope), pos)


def _activated(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    keys, values = m.expand(latent, rope)
    return m.attend(q, keys, values.relu(), pos)


def _read_twice(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return m.attend(q, *m.expand(latent, rope), pos) + latent.mean()


def _keys_elsewhere(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    keys, values = m.expand(latent, rope)
    return m.attend(q, keys, values, pos) + keys.amax()


def _expansion_elsewhere(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    made = m.up(latent)
    keys, values = made.view(*latent.shape[:2], m.heads, -1).transpose(1, 2).split([NOPE, VALUE], dim=-1)
    keys = torch.cat([keys, rope.unsqueeze(1).expand(-1, m.heads, -1, -1)], dim=-1)
    return m.attend(q, keys, values, pos) + made.std()


def _query_weight(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    weight = m.up.weight[None] * (1 + q.mean(dim=(1, 2, 3)))[:, None, None]
    made = (latent @ weight.mT).view(*latent.shape[:2], m.heads, -1).transpose(1, 2)
    nope, values = made.split([NOPE, VALUE], dim=-1)
    return m.attend(q, torch.cat([nope, rope.unsqueeze(1).expand(-1, m.heads, -1, -1)], dim=-1), values, pos)


def _two_projections(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return m.attend(q, *m.expand(latent @ (torch.eye(m.rank) * 2), rope), pos)


def _token_weight(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    weight = m.up.weight[None] * torch.linspace(0.5, 1.5, latent.shape[1])[:, None, None]
    made = torch.einsum("btr,tcr->btc", latent, weight).view(*latent.shape[:2], m.heads, -1).transpose(1, 2)
    nope, values = made.split([NOPE, VALUE], dim=-1)
    return m.attend(q, torch.cat([nope, rope.unsqueeze(1).expand(-1, m.heads, -1, -1)], dim=-1), values, pos)


def _made_in_place(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    made = m.up(latent)
    nope, values = made.view(*latent.shape[:2], m.heads, -1).transpose(1, 2).split([NOPE, VALUE], dim=-1)
    made.clamp_(min=0)
    return m.attend(q, torch.cat([nope, rope.unsqueeze(1).expand(-1, m.heads, -1, -1)], dim=-1), values, pos)


def _weight_in_place(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    weight = m.up.weight * 2
    made = F.linear(latent, weight).view(*latent.shape[:2], m.heads, -1).transpose(1, 2)
    weight.zero_()
    nope, values = made.split([NOPE, VALUE], dim=-1)
    return m.attend(q, torch.cat([nope, rope.unsqueeze(1).expand(-1, m.heads, -1, -1)], dim=-1), values, pos)


def _one_token_patched(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """One channel of one token is something else: no sampled element need be it."""
    keys, values = m.expand(latent, rope)
    whole = torch.empty_like(keys)
    whole[:] = keys
    whole[:, 1:2, 37:38, 5:6] = 0.0 * whole[:, :1, :1, :1]
    return m.attend(q, whole, values, pos)


def _returned(m: Read, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    keys, values = m.expand(latent, rope)
    m.seen = values
    return m.attend(q, keys, values, pos)


class Before(TwoBuffers):
    """Keys and values are made before the new latents are written."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q_nope, q_rope, latent, rope = self.parts(x, pos)
        keys, values = self.expand(self.latents, self.ropes)
        self.write(latent, rope, pos)
        return self.attend(torch.cat([q_nope, q_rope], -1), keys, values, pos)


LATENT_CASES = (
    Case("latent-two-buffers", TwoBuffers, by_position),
    Case("latent-filled", Filled, by_position),
    Case("latent-one-buffer", OneBuffer, by_offset),
    Case("latent-one-buffer-absorbed", OneBufferAbsorbed, by_offset),
    Case("latent-two-products", TwoProducts, by_position),
    Case("latent-einsums", Einsums, by_position),
    Case("latent-grouped", Grouped, by_position),
    Case("latent-grown", Grown, returned(None)),
    Case("latent-rolled", Rolled, by_position),
    Case("latent-keys-are-values", KeysAreValues, by_position, sizes={"kv": 2}),
    Case("latent-relative-scores", RelativeScores, by_position, sizes={"kv": 2}),
    Case("latent-bias", biased, by_position, refused="a bias is added"),
    read("latent-normed-after", _normed, "passes through layer_norm"),
    read("latent-activated", _activated, "by another operation than a view, here by relu"),
    read("latent-read-twice", _read_twice, "also read by mean"),
    read("latent-keys-elsewhere", _keys_elsewhere, "also read by amax"),
    read("latent-expansion-elsewhere", _expansion_elsewhere, "also read by std"),
    read("latent-weight-by-row", _query_weight, "no matrix of its own for each head"),
    read("latent-weight-by-token", _token_weight, "no matrix of its own for each head"),
    read("latent-two-projections", _two_projections, "passes through matmul"),
    read("latent-made-in-place", _made_in_place, "changed in place by clamp_"),
    read("latent-weight-in-place", _weight_in_place, "changed in place by zero_"),
    read("latent-one-token-patched", _one_token_patched, "put together in a way that is not known"),
    read("latent-made-and-returned", _returned, "returned to the caller"),
    # A single channel is a slot of its own.
    Case("latent-filled-but-for-one", FilledButForOne, by_position, refused="from more than two caches"),
    Case("latent-made-before", Before, by_position, refused="a copy of the cache made before the write"),
)
