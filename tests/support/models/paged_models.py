"""Attentions over caches that are read through a gather: block tables, token tables, rows assigned to requests.

Every model takes ``forward(x, pos, table)``: the positions of the new tokens of each row [B, S], and what says where a
row's tokens lie: its blocks in a shuffled pool, or its row of the cache.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from e2e_layers import Attention, buffers
from torch import nn

BLOCK, BLOCKS, ROWS = 8, 8, 7
"""Places of a block, blocks of a row, rows of a cache whose rows are assigned to requests."""

STEPS = (9, *[1] * 16)


class Paged(Attention):
    """A pool of blocks of both keys and values, and the ordinary end of the attention."""

    def __init__(self, batch: int = 3, heads: int = 4, kv: int = 2, dim: int = 16, **sizes: int) -> None:
        super().__init__(batch=batch, heads=heads, kv=kv, dim=dim, capacity=BLOCK * BLOCKS, **sizes)
        self.blocks = BLOCKS * batch + 2
        buffers(self, *self.shape())

    def shape(self) -> tuple[int, ...]:
        """The shape of one pool."""
        return (self.blocks, BLOCK, self.kv, self.dim)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Attention over [B, K, T, D], of which each row sees its own length."""
        mask = torch.arange(keys.shape[2], device=pos.device)[None, None, None] <= pos[:, None, :, None]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=self.kv < self.heads)
        return self.close(y)

    @staticmethod
    def where(pos: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, offsets) of the new tokens."""
        return table.gather(1, pos // BLOCK), pos % BLOCK


class BlocksFirst(Paged):
    """``pool[blocks, offsets] = k``, ``pool[table]`` flattened."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        self.k_cache[blocks, offsets] = k
        self.v_cache[blocks, offsets] = v
        keys, values = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache))
        return self.attend(q, keys, values, pos)


class HeadsFirst(Paged):
    """``pool[blocks, :, offsets] = k`` in blocks [NB, K, bs, D], and attention in products."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks, self.kv, BLOCK, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        self.k_cache[blocks, :, offsets] = k
        self.v_cache[blocks, :, offsets] = v
        rows = x.shape[0]
        keys, values = (
            pool[table].permute(0, 2, 1, 3, 4).reshape(rows, self.kv, -1, self.dim).repeat_interleave(self.heads // self.kv, 1)
            for pool in (self.k_cache, self.v_cache)
        )
        scores = q.transpose(1, 2) @ keys.mT * self.dim**-0.5
        seen = torch.arange(keys.shape[2], device=pos.device)[None, None, None] <= pos[:, None, :, None]
        return self.close(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values)


class Slots(Paged):
    """Places as numbers: ``view(-1, K, D)[slots] = k`` and ``index_select`` by the places of all tokens."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        slots = (blocks * BLOCK + offsets).flatten()
        tokens = (table[:, :, None] * BLOCK + torch.arange(BLOCK, device=table.device)).flatten()
        for pool, new in ((self.k_cache, k), (self.v_cache, v)):
            pool.view(-1, self.kv, self.dim)[slots] = new.flatten(0, 1)
        keys, values = (
            pool.view(-1, self.kv, self.dim).index_select(0, tokens).view(x.shape[0], -1, self.kv, self.dim).transpose(1, 2)
            for pool in (self.k_cache, self.v_cache)
        )
        return self.attend(q, keys, values, pos)


class FlatPool(Paged):
    """A pool without blocks, ``index_copy_(0, slots, k)``, and a table of tokens [B, T]."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks * BLOCK, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        tokens = (table[:, :, None] * BLOCK + torch.arange(BLOCK, device=table.device)).flatten(1)
        slots = tokens.gather(1, pos).flatten()
        self.k_cache.index_copy_(0, slots, k.flatten(0, 1))
        self.v_cache.index_copy_(0, slots, v.flatten(0, 1))
        return self.attend(q, self.k_cache[tokens].transpose(1, 2), self.v_cache[tokens].transpose(1, 2), pos)


class RowsOfRequests(Paged):
    """Continuous batching: request b lives in row ``table[b]`` of the cache."""

    def shape(self) -> tuple[int, ...]:
        return (ROWS, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[table[:, None], :, pos] = k
        self.v_cache[table[:, None], :, pos] = v
        return self.attend(q, self.k_cache[table], self.v_cache[table], pos)


class RowsTokensFirst(RowsOfRequests):
    """The same with tokens ahead of heads, written at places of a flat view and read by ``index_select``."""

    def shape(self) -> tuple[int, ...]:
        return (ROWS, self.capacity, self.kv, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[table[:, None], pos] = k
        self.v_cache[table[:, None], pos] = v
        keys, values = (pool.index_select(0, table).transpose(1, 2) for pool in (self.k_cache, self.v_cache))
        return self.attend(q, keys, values, pos)


class RowsAndHeads(RowsOfRequests):
    """Rows, heads and positions by an index each, in writes and reads."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, heads = table[:, None, None], torch.arange(self.kv, device=table.device)[:, None]
        self.k_cache[rows, heads, pos[:, None]] = k.transpose(1, 2)
        self.v_cache[rows, heads, pos[:, None]] = v.transpose(1, 2)
        keys, values = (pool[rows, heads, torch.arange(self.capacity, device=pos.device)] for pool in (self.k_cache, self.v_cache))
        return self.attend(q, keys, values, pos)


class RowsTaken(RowsOfRequests):
    """Rows by ``gather`` with an expanded index and by ``take_along_dim``, the last tokens cut off."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[table[:, None], :, pos] = k
        self.v_cache[table[:, None], :, pos] = v
        index = table[:, None, None, None]
        keys = self.k_cache.gather(0, index.expand(-1, *self.k_cache.shape[1:]))
        values = torch.take_along_dim(self.v_cache, index, 0)
        return self.attend(q, keys[:, :, :-5], values[:, :, :-5], pos)


class OnePool(Paged):
    """Keys and values in one tensor [2, NB, bs, K, D], two writes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        del self.k_cache, self.v_cache
        buffers(self, 2, *self.shape(), names=("pool",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        self.pool[0, blocks, offsets] = k
        self.pool[1, blocks, offsets] = v
        keys, values = (self.pool[part][table].flatten(1, 2).transpose(1, 2) for part in (0, 1))
        return self.attend(q, keys, values, pos)


class OneWrite(OnePool):
    """Keys and values side by side in every block, one write, and a gather of both."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks, 2, self.kv, BLOCK, self.dim)

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, *self.shape(), names=("pool",))

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        self.pool[blocks, :, :, offsets] = torch.stack((k, v), 2)
        both = self.pool[table].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        return self.attend(q, both[0], both[1], pos)


class TokenByToken(Paged):
    """Every token by its own block and offset, ``pool[table[:, t // bs], t % bs]``; channels of all heads in one dim."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks, BLOCK, self.kv * self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        self.k_cache[blocks, offsets] = k.flatten(2)
        self.v_cache[blocks, offsets] = v.flatten(2)
        t = torch.arange(self.capacity, device=pos.device)
        keys, values = (
            pool[table[:, t // BLOCK], t % BLOCK].unflatten(2, (self.kv, self.dim)).transpose(1, 2) for pool in (self.k_cache, self.v_cache)
        )
        return self.attend(q, keys, values, pos)


class Looked(Paged):
    """Keys written by ``scatter_`` and looked up by ``embedding``, values by ``gather`` with an expanded index."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks * BLOCK, self.kv * self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        tokens = (table[:, :, None] * BLOCK + torch.arange(BLOCK, device=table.device)).flatten(1)
        slots = tokens.gather(1, pos).flatten()
        self.k_cache.scatter_(0, slots[:, None].expand(-1, self.kv * self.dim), k.flatten(0, 1).flatten(1))
        self.v_cache[slots] = v.flatten(0, 1).flatten(1)
        keys = F.embedding(tokens, self.k_cache)
        values = self.v_cache.gather(0, tokens.flatten()[:, None].expand(-1, self.kv * self.dim)).unflatten(0, tokens.shape)
        keys, values = (item.unflatten(2, (self.kv, self.dim)).transpose(1, 2) for item in (keys, values))
        return self.attend(q, keys, values, pos)


class UsedBlocks(BlocksFirst):
    """Only the blocks that the longest row has filled are read: the table is cut to a number that grows."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor, used: int = 2) -> torch.Tensor:
        return super().forward(x, pos, table[:, :used])


class OneToken(RowsOfRequests):
    """Rows of requests, the prompt written through a row and a position for every token, keys in dims B H of ``bmm``."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = table[:, None].expand_as(pos).flatten()
        self.k_cache[rows, :, pos.flatten()] = k.flatten(0, 1)
        self.v_cache[rows, :, pos.flatten()] = v.flatten(0, 1)
        keys, values = (
            pool[table].repeat_interleave(self.heads // self.kv, 1).flatten(0, 1) for pool in (self.k_cache, self.v_cache)
        )
        scores = torch.bmm(q.transpose(1, 2).flatten(0, 1), keys.mT).unflatten(0, (x.shape[0], self.heads)) * self.dim**-0.5
        seen = torch.arange(self.capacity, device=pos.device)[None, None, None] <= pos[:, None, :, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).flatten(0, 1)
        return self.close(torch.bmm(weights, values).unflatten(0, (x.shape[0], self.heads)))


class FlatTable(HeadsFirst):
    """The table of all rows as one list of blocks, and an ``index_put_`` into a permuted view."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        for pool, new in ((self.k_cache, k), (self.v_cache, v)):
            pool.transpose(1, 2)[self.where(pos, table)] = new
        keys, values = (
            pool.index_select(0, table.flatten()).unflatten(0, table.shape).transpose(1, 2).flatten(2, 3)
            for pool in (self.k_cache, self.v_cache)
        )
        return self.attend(q, keys, values, pos)


class TwoTables(BlocksFirst):
    """Keys and values in blocks of their own: each is gathered by its own table."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        other = table.flip(0)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, other)] = v
        # The values are gathered first.
        values = self.v_cache[other].flatten(1, 2).transpose(1, 2)
        return self.attend(q, self.k_cache[table].flatten(1, 2).transpose(1, 2), values, pos)


class SharedPrefix(BlocksFirst):
    """The first block of every row is row 0's: two rows read the same places."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, table)] = v
        table = torch.cat((table[:1, :1].expand(x.shape[0], 1), table[:, 1:]), 1)
        keys, values = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache))
        return self.attend(q, keys, values, pos)


class RowByRow(BlocksFirst):
    """An attention of its own for every row, all over one pool."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, table)] = v
        rows = []
        for row in range(x.shape[0]):
            keys, values = (pool[table[row]].flatten(0, 1).transpose(0, 1)[None] for pool in (self.k_cache, self.v_cache))
            rows.append(self.attend(q[row : row + 1], keys, values, pos[row : row + 1]))
        return torch.cat(rows)


class Lengths(Paged):
    """32-bit tables and slots, values written by ``index_copy_``, a mask that is added, from lengths."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        blocks, offsets = self.where(pos, table)
        slots, table = (blocks * BLOCK + offsets).view(-1), table.to(torch.int32)
        flat = self.kv * self.dim
        self.k_cache.view(-1, flat)[slots.to(torch.int32)] = k.reshape(-1, flat)
        self.v_cache.view(-1, flat).index_copy_(0, slots, v.reshape(-1, flat))
        keys, values = (
            torch.index_select(pool, 0, table.view(-1)).view(x.shape[0], -1, self.kv, self.dim) for pool in (self.k_cache, self.v_cache)
        )
        past = torch.arange(keys.shape[1], device=pos.device) >= (pos + 1)[:, None, :, None]
        bias = torch.zeros(past.shape, dtype=q.dtype).masked_fill(past, float("-inf"))
        scores = torch.einsum("bskgd,btkd->bkgst", q.unflatten(2, (self.kv, -1)), keys) * self.dim**-0.5 + bias[:, :, None]
        return self.o(torch.einsum("bkgst,btkd->bskgd", scores.softmax(-1), values).flatten(2))


class Packed(Paged):
    """Tokens of all requests in one row: written at ``write``, attended to at ``read``, with a mask that keeps requests apart."""

    def shape(self) -> tuple[int, ...]:
        return (self.blocks * BLOCK, self.kv, self.dim)

    def forward(self, x: torch.Tensor, write: torch.Tensor, read: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.k_cache.index_copy_(0, write, k[0])
        self.v_cache.index_copy_(0, write, v[0])
        keys, values = (pool.index_select(0, read).transpose(0, 1)[None] for pool in (self.k_cache, self.v_cache))
        return self.close(F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=self.kv < self.heads))


class BesideAStaticCache(BlocksFirst):
    """Two attentions in one graph: one over a pool, one over an ordinary cache of as many tokens as the pool has places."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.batch, self.kv, self.blocks * BLOCK, self.dim, names=("k_static", "v_static"))

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(x.shape[0])[:, None]
        self.k_static[rows, :, pos] = k
        self.v_static[rows, :, pos] = v
        return super().forward(x, pos, table) + self.attend(q, self.k_static, self.v_static, pos)


class GivenBack(BlocksFirst):
    """The pools come in and are returned as they came."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        del self.k_cache, self.v_cache

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        q, k, v = self.project(x)
        keys = keys.index_put_(self.where(pos, table), k)
        values = values.index_put_(self.where(pos, table), v)
        return self.attend(q, *(pool[table].flatten(1, 2).transpose(1, 2) for pool in (keys, values)), pos), keys, values


class WholeBlocks(BlocksFirst):
    """A prompt of whole blocks is written by the block, single tokens by their places."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        if x.shape[1] % BLOCK == 0:
            count = x.shape[1] // BLOCK
            self.k_cache[table[:, :count]] = k.unflatten(1, (count, BLOCK))
            self.v_cache[table[:, :count]] = v.unflatten(1, (count, BLOCK))
        else:
            self.k_cache[self.where(pos, table)] = k
            self.v_cache[self.where(pos, table)] = v
        return self.attend(q, *(pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k_cache, self.v_cache)), pos)


class PoolOfLatents(Paged):
    """Keys and values are projected from what is gathered."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        del self.k_cache, self.v_cache
        buffers(self, self.blocks, BLOCK, 8, names=("latent",))
        self.down = nn.Linear(self.width, 8, bias=False)
        self.up_k, self.up_v = (nn.Linear(8, self.width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.latent[self.where(pos, table)] = self.down(x)
        held = self.latent[table].flatten(1, 2)
        keys, values = (up(held).unflatten(2, (self.heads, -1)).transpose(1, 2) for up in (self.up_k, self.up_v))
        return self.attend(self.q(x).unflatten(2, (self.heads, -1)), keys, values, pos)


class LatentsAndRotary(PoolOfLatents):
    """Blocks of latents beside blocks of a rotary part that all heads share; keys are made of both."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, self.blocks, BLOCK, 4, names=("rotary",))
        self.down_r = nn.Linear(self.width, 4, bias=False)
        self.q_r = nn.Linear(self.width, 4 * self.heads, bias=False)

    def held(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(latents, rotary part) of every row, [B, T, 8] and [B, T, 4], the new ones among them."""
        self.latent[self.where(pos, table)] = self.down(x)
        self.rotary[self.where(pos, table)] = self.down_r(x)
        return self.latent[table].flatten(1, 2), self.rotary[table].flatten(1, 2)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        latent, rotary = self.held(x, pos, table)
        keys, values = (up(latent).unflatten(2, (self.heads, -1)).transpose(1, 2) for up in (self.up_k, self.up_v))
        keys = torch.cat((keys, rotary.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        q = torch.cat((self.q(x).unflatten(2, (self.heads, -1)), self.q_r(x).unflatten(2, (self.heads, -1))), -1)
        return self.attend(q, keys, values, pos)


class LatentRows(LatentsAndRotary):
    """Latent and rotary part side by side in one pool."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        del self.latent, self.rotary
        buffers(self, self.blocks, BLOCK, 12, names=("both",))

    def held(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.both[self.where(pos, table)] = torch.cat((self.down(x), self.down_r(x)), -1)
        latent, rotary = self.both[table].flatten(1, 2).split((8, 4), -1)
        return latent, rotary


# --- what is refused ------------------------------------------------------------------------------------


class Unusual(BlocksFirst):
    """``BlocksFirst`` with one thing that is not as it should be; subclasses change a step."""

    def write(self, pool: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        """Write the new tokens."""
        pool[where] = new

    def read(self, pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[B, K, T, D]."""
        return pool[table].flatten(1, 2).transpose(1, 2)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        where = self.where(pos, table)
        self.write(self.k_cache, where, k)
        self.write(self.v_cache, where, v)
        return self.attend(q, self.read(self.k_cache, table), self.read(self.v_cache, table), pos)


class PoolProbed(Unusual):
    """The whole pool is read by something else."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return super().forward(x, pos, table) + self.k_cache.abs().amax() * 0


class KeysProbed(Unusual):
    """What is gathered is read by something else than the attention."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return super().attend(q, keys, values, pos) + keys.abs().amax() * 0


class LatentsProbed(PoolOfLatents):
    """The gathered latents are read by something else than the projections."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = super().forward(x, pos, table)
        return y + self.latent[table].abs().amax() * 0


class TableOfKeys(Unusual):
    """The blocks that are read are chosen by the keys in them."""

    def read(self, pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        best = self.k_cache.flatten(1).abs().amax(1)[table].topk(BLOCKS, 1).indices.sort(1).values
        return super().read(pool, table.gather(1, best))


class ReadFirst(Unusual):
    """The tokens are gathered before the new ones are written."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        keys, values = self.read(self.k_cache, table), self.read(self.v_cache, table)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, table)] = v
        return self.attend(q, keys, values, pos)


class WrittenLast(Unusual):
    """The new tokens are written after the attention, which the next call reads them in."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        y = self.attend(q, self.read(self.k_cache, table), self.read(self.v_cache, table), pos)
        self.k_cache[self.where(pos, table)] = k
        self.v_cache[self.where(pos, table)] = v
        return y


class WrittenTwice(Unusual):
    """A second write between the first and the gather."""

    def write(self, pool: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        pool[where] = new
        pool[where[0][:, -1:], where[1][:, -1:]] = new[:, -1:] * 2


class Accumulated(Unusual):
    """The write adds to what is there."""

    def write(self, pool: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        pool.index_put_(where, new, accumulate=True)


class CopiedWhole(Unusual):
    """Written by a copy over all of it."""

    def write(self, pool: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        pool.copy_(pool.index_put(where, new))


class FewHeads(Unusual):
    """Only the first head is written."""

    def write(self, pool: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
        pool[:, :, :1][where] = new[:, :, :1]


class OtherOrder(Unusual):
    """A flat copy of the pool with the offset ahead of the block."""

    def read(self, pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        flat = pool.transpose(0, 1).reshape(-1, self.kv, self.dim)
        return flat[(table[:, :, None] + torch.arange(BLOCK, device=table.device) * self.blocks).flatten(1)].transpose(1, 2)


class BackwardBlocks(Unusual):
    """Tokens of a block are read in the order of the offsets turned around."""

    def read(self, pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return pool[table][:, :, torch.arange(BLOCK - 1, -1, -1)].flatten(1, 2).transpose(1, 2)


class AlsoAsItLies(RowsOfRequests):
    """One attention gathers rows of the cache, another one reads them as they lie."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows = torch.arange(ROWS)[:, None]
        self.k_cache[rows, :, pos] = k
        self.v_cache[rows, :, pos] = v
        y = self.attend(q, self.k_cache, self.v_cache, pos)
        return y + self.attend(q, self.k_cache[table], self.v_cache[table], pos)


class TwoThirdsOfAPool(OnePool):
    """A part of the pool that no attention reads."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        buffers(self, 3, *self.shape(), names=("pool",))


class HeadsInAnOrder(Paged):
    """An ordinary cache whose heads are gathered."""

    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.kv, self.capacity, self.dim)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        rows, heads = torch.arange(x.shape[0])[:, None], torch.arange(self.kv).flip(0)
        self.k_cache[rows, :, pos] = k
        self.v_cache[rows, :, pos] = v
        return self.attend(q, self.k_cache[:, heads], self.v_cache[:, heads], pos)


class Layers(nn.Module):
    """All layers' blocks in one tensor [L, 2, NB, bs, K, D]."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Paged(**sizes) for _ in range(2))
        one = self.layers[0]
        for layer in self.layers:
            del layer.k_cache, layer.v_cache
        buffers(self, 2, 2, *one.shape(), names=("pool",))
        self.batch, self.width, self.blocks = one.batch, one.width, one.blocks

    def forward(self, x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(x)
            blocks, offsets = layer.where(pos, table)
            self.pool[index, 0, blocks, offsets] = k
            self.pool[index, 1, blocks, offsets] = v
            keys, values = (self.pool[index, part][table].flatten(1, 2).transpose(1, 2) for part in (0, 1))
            x = x + layer.attend(q, keys, values, pos)
        return x


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """A model and how its table is made: ``rows`` of a cache, or blocks; ``grows``: it takes how many blocks are in use."""

    name: str
    build: Callable[..., nn.Module]
    rows: bool = False
    grows: bool = False
    refused: str = ""
    sites: int = 1
    """Attentions of one call."""
    steps: tuple[int, ...] = STEPS
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
        """The module with weights from a fixed seed."""
        torch.manual_seed(0)
        return self.build(**{**self.sizes, **sizes}).to(dtype).eval()

    def table(self, module: Any) -> torch.Tensor:
        """Where each request's tokens lie, in no order."""
        generator = torch.Generator().manual_seed(2)
        if self.rows:
            return torch.randperm(ROWS, generator=generator)[: module.batch]
        return torch.randperm(module.blocks, generator=generator)[: module.batch * BLOCKS].view(module.batch, BLOCKS)

    def drive(self, module: Any, call: Callable[..., torch.Tensor], steps: Sequence[int] | None = None) -> list[torch.Tensor]:
        """A prompt, of which odd rows are two tokens short and even ones whole, then one token after another."""
        generator, table = torch.Generator().manual_seed(1), self.table(module)
        lengths = torch.zeros(module.batch, dtype=torch.int64)
        results = []
        for number, count in enumerate(steps or self.steps):
            x = torch.randn(module.batch, count, module.width, generator=generator).to(next(module.parameters()).dtype)
            pos = lengths[:, None] + torch.arange(count)
            used = (-(-(int(pos.max()) + 1) // BLOCK),) if self.grows else ()
            results.append(call(x, pos, table, *used))
            lengths = lengths + count - (torch.arange(module.batch) % 2 * 2 if number == 0 else 0)
        return results

    def error(self, backend: Any, steps: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, **sizes: int) -> float:
        """The largest difference between the compiled module and the module itself."""
        module = self.make(dtype, **sizes)
        plain = copy.deepcopy(module)
        with torch.no_grad():
            expected = self.drive(plain, plain, steps)
            found = self.drive(module, torch.compile(module, backend=backend, fullgraph=True), steps)
        return max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))


PAGED_CASES = (
    PagedCase("blocks-first", BlocksFirst),
    PagedCase("heads-first", HeadsFirst),
    PagedCase("slots", Slots),
    PagedCase("flat-pool", FlatPool),
    PagedCase("rows-of-requests", RowsOfRequests, rows=True),
    PagedCase("rows-tokens-first", RowsTokensFirst, rows=True),
    PagedCase("rows-and-heads", RowsAndHeads, rows=True),
    PagedCase("rows-taken", RowsTaken, rows=True),
    PagedCase("one-pool", OnePool),
    PagedCase("one-write", OneWrite),
    PagedCase("token-by-token", TokenByToken),
    PagedCase("looked-up", Looked),
    PagedCase("used-blocks", UsedBlocks, grows=True),
    PagedCase("pool-of-layers", Layers, sites=2),
    PagedCase("one-token", OneToken, rows=True),
    PagedCase("flat-table", FlatTable),
    PagedCase("two-tables", TwoTables),
    PagedCase("shared-prefix", SharedPrefix),
    PagedCase("row-by-row", RowByRow, sites=3),
    PagedCase("lengths", Lengths),
    PagedCase("pool-of-latents", PoolOfLatents),
    PagedCase("latents-and-rotary", LatentsAndRotary),
    PagedCase("latent-rows", LatentRows),
    PagedCase("beside-a-static-cache", BesideAStaticCache, sites=2),
    PagedCase("whole-blocks", WholeBlocks, steps=(16, *[1] * 16)),
)

REFUSED_CASES = (
    PagedCase("pool-probed", PoolProbed, refused="the cache is also read by abs"),
    PagedCase("keys-probed", KeysProbed, refused="also read by"),
    PagedCase("latents-probed", LatentsProbed, refused="also read by"),
    PagedCase("table-of-keys", TableOfKeys, refused="the cache is also read by"),
    PagedCase("read-first", ReadFirst, refused="a copy of the cache made before the write"),
    PagedCase("written-last", WrittenLast, refused="written after the attention that gathers from it"),
    PagedCase("written-twice", WrittenTwice, refused="written 2 times"),
    PagedCase("accumulated", Accumulated, refused="accumulates"),
    PagedCase("copied-whole", CopiedWhole, refused="written by copy_, which is no known way to write slots"),
    PagedCase("few-heads", FewHeads, refused="only part of the cache's heads or channels"),
    PagedCase("other-order", OtherOrder, refused="slots are in another order"),
    PagedCase("backward-blocks", BackwardBlocks, refused="not whole tokens from slots"),
    PagedCase("also-as-it-lies", AlsoAsItLies, rows=True, sizes={"batch": ROWS}, refused="another one reads it contiguously"),
    PagedCase("two-thirds-of-a-pool", TwoThirdsOfAPool, refused="entries are read by attention in this graph"),
    PagedCase("heads-in-an-order", HeadsInAnOrder, refused="along something else than batch rows, tokens and blocks"),
)
