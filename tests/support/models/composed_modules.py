"""Attentions with tensors that are made of others: sharded by ``DTensor``, over a group of one process, or quantized by a class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_models import Attention, Buffered, visible
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

aten = torch.ops.aten


def mesh() -> DeviceMesh:
    """The processes of the group that is open, as one dim."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def shard(module: nn.Module) -> nn.Module:
    """Shard an attention's projections by heads, and add up their results: tensor parallelism as torch has it."""
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    return parallelize_module(module, mesh(), plan)


class Parted(torch.Tensor):
    """A weight of bytes and one scale a row, that ``__torch_dispatch__`` multiplies by: what libraries of quantized weights have."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Parted:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Parted:
        return Parted(parts["codes"], parts["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        # Torch 2.11 prints the arguments of what it compiles, and the default asks for values.
        return f"Parted({tuple(self.shape)})"

    def full(self) -> torch.Tensor:
        """The weight as a plain tensor."""
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {aten.detach.default, aten.alias.default, aten.clone.default}:
            return Parted(func(args[0].codes), func(args[0].scale))
        return func(*[item.full() if isinstance(item, Parted) else item for item in args], **(kwargs or {}))


def quantize(module: nn.Module) -> nn.Module:
    """Replace an attention's weights by bytes with a scale a row."""
    for name in ("q", "k", "v", "o"):
        weight = getattr(module, name).weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        part = Parted((weight / scale).round().to(torch.int8), scale)
        getattr(module, name).weight = nn.Parameter(part, requires_grad=False)
    return module


class Indexed(Buffered):
    """An ordinary attention over two buffers."""

    def written(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, and the caches with the new tokens in them."""
        q, k, v = self.heads_first(x)
        return q, self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, keys, values = self.written(x, pos)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class ShardedBias(Indexed):
    """A bias by distance from a table that all processes share."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.table = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 32)[:, None].repeat(1, self.heads), mesh(), [Replicate()]))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, keys, values = self.written(x, pos)
        far = (pos[:, None] - torch.arange(self.capacity)).clamp(0, 31)
        bias = self.table.to_local()[far].permute(2, 0, 1)[None]
        mask = torch.where(visible(pos, self.capacity), bias, float("-inf"))
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


class ShardedCache(Attention):
    """A cache that is itself sharded by heads."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        for name in ("k_cache", "v_cache"):
            zeros = torch.zeros(self.batch, self.kv, self.capacity, self.dim)
            self.register_buffer(name, distribute_tensor(zeros, mesh(), [Shard(1)]))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        keys, values = self.k_cache.to_local(), self.v_cache.to_local()
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, keys, values, attn_mask=visible(pos, self.capacity)))


class SeenTwice(Indexed):
    """The queries change in place between scores and weights, through a tensor that only shares their memory: scores count twice."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.mesh = [mesh()]

    def __deepcopy__(self, memo: dict[int, Any]) -> SeenTwice:
        # A mesh has no copy.
        other = SeenTwice(batch=self.batch, heads=self.heads, kv=self.kv, dim=self.dim, capacity=self.capacity)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, keys, values = self.written(x, pos)
        again = DTensor.from_local(q, self.mesh[0], [Replicate()]).to_local()
        scores = q @ keys.mT
        again.mul_(0.0)
        weights = scores.masked_fill(~visible(pos, self.capacity), float("-inf")).softmax(-1)
        return self.close(weights @ values + q)


class WrittenInPlace(Indexed):
    """A sharded table changes in every call."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("count", distribute_tensor(torch.zeros(1), mesh(), [Replicate()]))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return super().forward(x, pos) * self.count.to_local()
