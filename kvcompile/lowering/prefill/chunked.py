"""Attention of very many rows over codes: each chunk of tokens is decoded once into a scratch buffer, for all rows.

The prefill template decodes a tile of tokens in every program that reads it; from a thousand rows a kv head on that costs as
much as the products. Here a kernel (``decode_chunk``) decodes a chunk, a constant number of tokens, into the
content of a dense cache, the template runs over that as over dense planes, and partial sums stay
in the output from chunk to chunk. The scratch never grows with the tokens.

The number of chunks follows from the planes' capacity, which the host knows; only the device knows how much of it is
in use: programs beyond the newest position return at once. Nothing waits for the device, so a CUDA graph can capture the launches.

``kvcompile::attend_chunks`` takes the operands of ``attend`` that the template supports, without sinks, and ``cut``: chunk, splits, tokens
and rows of a tile, warps, stages. It returns partial sums, maxima and totals, float32 [splits, B, H, S, Dv + 2], to be merged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcompile.lowering.decode.config import Tile
from kvcompile.lowering.decode.offline import ARCHITECTURES, KERNEL, Operand, load_module
from kvcompile.lowering.host.triton_api import POINTERS, compile_for
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.lowering.ops.sizes import TensorSizes
from kvcompile.lowering.prefill import decode_chunk as decode_source
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.offline import render
from kvcompile.lowering.prefill.site import config_of

LIBRARY.define(
    "attend_chunks(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, str key_scheme, str value_scheme,"
    " float scale, float softcap, int value_dim, Tensor[]? exact_newest, Tensor? base, int[] cut) -> Tensor"
)


@dataclasses.dataclass(frozen=True)
class ChunkKernel:
    """One of the two kernels: its module's source, its pointers' dtypes by name, and its warps and stages."""

    name: str
    source: str
    pointers: Mapping[str, torch.dtype]
    warps: int
    stages: int

    def compiled(self, arch: str) -> dict[str, str | bytes]:
        """Return this kernel's ``ttgir``, ``ptx`` and ``cubin`` by name, compiled for architecture ``arch``. Needs no device.

        Integer arguments outside of ``LOOSE``, strides among them, are assumed to be multiples of 16.
        """
        kernel = getattr(load_module(self.source, "chunked"), self.name)
        signature = {name: POINTERS[self.pointers[name]] if name in self.pointers else "i32" for name in kernel.arg_names}
        return compile_for(kernel, signature, set(signature) - LOOSE, ARCHITECTURES[arch], self.warps, self.stages)


LOOSE = frozenset({"hi_b", "hi_s", "lo_b", "lo_s", "keep_b", "keep_t", "keep_n", "recent_n", "base_b", "NEWEST_b", "OLDEST_b", "BASE_b"})
"""Integer arguments that need not be multiples of 16."""


def cut_as(config: PrefillConfig, cut: Sequence[int]) -> PrefillConfig:
    """Return the configuration with the sizes of the operand ``cut``."""
    chunk, splits, tokens, rows, warps, stages = cut
    tile = Tile(tokens, rows, False, warps, stages)
    return dataclasses.replace(config, chunk=chunk, splits=splits, tile=tile)


def decoder(config: PrefillConfig) -> ChunkKernel:
    """Return the kernel that decodes a chunk of both slots."""
    types = {"K_OUT": config.dtype, "V_OUT": config.dtype, "NEWEST": torch.int64, "OLDEST": torch.int64, "BASE": torch.int64}
    for letter, word in (("K", config.key_word), ("V", config.value_word)):
        half = {f"{letter}_{plane}": torch.float16 for plane in ("SCALES", "ZEROS")}
        types |= half | {f"{letter}_WORDS": word, f"{letter}_TABLE": torch.float32}
    pointers, _ = decode_source.arguments_of(config)
    return ChunkKernel(
        decode_source.KERNEL, decode_source.decode_source(config), {name: types[name] for name in pointers}, decode_source.WARPS, 1
    )


def attender(config: PrefillConfig) -> ChunkKernel:
    """Return the template's kernel over the scratch; sizes and strides that may change between calls are arguments."""
    own = config.over_scratch()
    heads, key, value = own.kv_heads, own.key_dim, own.value_dim

    def scratch(dim: int) -> Operand:
        return Operand((1, 0, heads, own.chunk, dim), (0, heads * own.chunk * dim, own.chunk * dim, dim, 1), own.dtype)

    every = {
        "Q": Operand((0, heads * own.group, "S", key), ("q_b", "q_h", "q_s", 1), own.dtype),
        "HI": Operand((0, 0), ("hi_b", "hi_s"), torch.int64), "LO": Operand((0, 0), ("lo_b", "lo_s"), torch.int64),
        "K_WORDS": scratch(key), "V_WORDS": scratch(value), "KEEP": Operand((0, "keep_n"), ("keep_b", "keep_t"), torch.bool),
        "RECENT_K": Operand((0, heads, "recent_n", key), ("recent_k_b", "recent_k_h", "recent_k_j", 1), own.dtype),
        "RECENT_V": Operand((0, heads, "recent_n", value), ("recent_v_b", "recent_v_h", "recent_v_j", 1), own.dtype),
        "BASE": Operand((0,), ("base_b",), torch.int64),
    }
    operands = {name: every[name] for name in own.operands}
    out = Operand((own.splits, 0, heads * own.group, "S", value + 2), ("out_z", "out_b", "out_h", value + 2, 1), torch.float32)
    pointers = {**{name: operand.dtype for name, operand in operands.items()}, "OUT": out.dtype}
    return ChunkKernel(KERNEL, render(own, operands, out), pointers, own.tile.num_warps, own.tile.num_stages)


@functools.lru_cache(maxsize=256)
def _loaded(config: PrefillConfig) -> tuple[Any, Any]:
    """Return (decoder, attender): the two Triton functions of a site, loaded from their rendered sources; cached."""
    return tuple(getattr(load_module(made.source, "chunked"), made.name) for made in (decoder(config), attender(config)))  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ChunkLaunch:
    """One kernel launch, with arguments in order."""

    kernel: Any
    arguments: tuple[Any, ...]
    grid: tuple[int, int, int]
    warps: int
    stages: int

    def run(self) -> None:
        """Start the kernel on the current device."""
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, num_stages=self.stages)


def launches(
    operands: AttendOperands[torch.Tensor], cut: Sequence[int], *, packed: bool | None = None
) -> tuple[torch.Tensor, list[ChunkLaunch]]:
    """Return the tensor of partial sums, and the launches that fill it, in order; ``packed``: None uses PTX except on HIP."""
    q, keys, values, hi, lo, keep, base = (
        operands.q, operands.keys, operands.values, operands.hi, operands.lo, operands.keep, operands.base
    )
    value_dim = operands.value_dim
    B, H, S, D = q.shape
    K = keys[0].shape[2]
    config = cut_as(config_of(operands, TensorSizes(), packed=packed), cut)
    chunk, splits = config.chunk, config.splits
    q, exact_newest = _inner_dense(q), [_inner_dense(x) for x in operands.exact_newest or ()]
    out = q.new_empty((splits, B, H, S, value_dim + 2), dtype=torch.float32)
    scratch = [q.new_empty((1, B, K, chunk, dim)) for dim in (D, value_dim)]
    capacity = keys[0].shape[0] * keys[0].shape[3]
    attended = {
        "Q": q, "HI": hi, "LO": lo, "KEEP": keep, "BASE": base, "K_WORDS": scratch[0], "V_WORDS": scratch[1], "OUT": out, "S": S,
        **dict(zip(("RECENT_K", "RECENT_V"), exact_newest, strict=False)), "CAPACITY": capacity,
        **_steps("q", "bhs", q), **_steps("hi", "bs", hi), **_steps("lo", "bs", lo), **_steps("keep", "bt", keep),
        **_steps("base", "b", base), **_steps("out", "zbh", out),
        "keep_n": 0 if keep is None else keep.shape[1], "recent_n": exact_newest[0].shape[2] if exact_newest else 0,
    }
    for name, rows in zip(("recent_k", "recent_v"), exact_newest, strict=False):
        attended |= _steps(name, "bhj", rows)
    limits = {"NEWEST": hi.amax(1), "OLDEST": None if lo is None else lo.amin(1), "BASE": base}
    decoded = {"K_OUT": scratch[0], "V_OUT": scratch[1], "CAPACITY": capacity, **limits}
    decoded |= {f"{name}_b": 0 if each is None or each.shape[0] == 1 else each.stride(0) for name, each in limits.items()}
    for letter, planes, slot in zip("KV", (keys, values), config.decoded, strict=True):
        for name, plane in zip(decode_source.planes_of(letter, slot), planes, strict=False):
            decoded |= {name: plane, **_steps(name, "nbhr", plane)}
    decode, attend = _loaded(config)
    tiles = -(-S * (H // K) // config.tile.block_r)
    found = []
    for first in range(0, capacity, chunk):
        programs = min(chunk, capacity - first) // decode_source.TOKENS
        for kernel, given, grid, warps, stages in (
            (decode, decoded, (programs, B * K, 2), decode_source.WARPS, 1),
            (attend, attended, (tiles, B * K, splits), config.tile.num_warps, config.tile.num_stages),
        ):
            given["FIRST"] = first
            found.append(ChunkLaunch(kernel, tuple(given[name] for name in kernel.arg_names), grid, warps, stages))
    return out, found


def _steps(name: str, axes: str, tensor: torch.Tensor | None) -> dict[str, Any]:
    """Return the strides of a tensor's first axes, by argument name; empty for None."""
    return {} if tensor is None else {f"{name}_{axis}": step for axis, step in zip(axes, tensor.stride(), strict=False)}


def attend_chunks(operands: AttendOperands[torch.Tensor], cut: Sequence[int], packed: bool | None = None) -> torch.Tensor:
    """Run both kernels; return partial sums of ``attend``, float32 [splits, B, H, S, Dv + 2].

    ``cut``: the result of ``choose_cut``; ``packed``: False avoids PTX, as the interpreter needs.
    """
    with torch.cuda.device_of(operands.q):
        out, found = launches(operands, cut, packed=packed)
        for launch in found:
            launch.run()
    return out


def _inner_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def record_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[AttendOperands[torch.Tensor], list[int]]:
    """Return the operands of ``attend`` in the arguments of a call of ``kvcompile::attend_chunks``, and the call's ``cut``."""
    given = named(operation, args, kwargs)
    return attend_operands({**given, "bias": None, "sinks": None}), given["cut"]


def _attend_chunks(*args: Any, **kwargs: Any) -> torch.Tensor:
    return attend_chunks(*record_of(args, kwargs))


def _attend_chunks_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    operands, cut = record_of(args, kwargs)
    return operands.q.new_empty((cut[1], *operands.q.shape[:3], operands.value_dim + 2), dtype=torch.float32)


LIBRARY.impl("attend_chunks", _attend_chunks, "CUDA")
LIBRARY.impl("attend_chunks", _attend_chunks_meta, "Meta")

operation = torch.ops.kvcompile.attend_chunks.default
