"""The attend kernel that a site of a rewritten graph gets on a GPU, chosen on a machine without one.

Makes the choices of Inductor's lowerings (``decode.lower``, ``prefill.lower``) from the fake values of an ``attend`` node
instead of Inductor's buffers, and with a named architecture's number of multiprocessors instead of a device's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile import schemes
from kvcompile.lowering.decode.config import AttendConfig, Bias, ExtraOperands, Masks
from kvcompile.lowering.decode.offline import attend_source, compile_offline
from kvcompile.lowering.decode.tiles import choose_tiles, ragged_splits, splits_for, writes_directly
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.prefill import chunked
from kvcompile.lowering.prefill import offline as prefill_offline
from kvcompile.lowering.prefill import tiles as prefill_tiles
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.tiles import choose_cut
from kvcompile.types import PAGE, KernelFormat, Role, SlotSpec

MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
"""Multiprocessors of an A100, an H100 or H200, a B200; only the number of splits depends on them."""

SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
"""Bytes of shared memory that one program may use, by architecture."""


@dataclass(frozen=True)
class SiteKernel:
    """One decode kernel, with the sizes that it is rendered for: batch rows B and new tokens S."""

    config: AttendConfig
    batch: int
    queries: int

    def source(self) -> str:
        """Return the Triton module."""
        return attend_source(self.config, self.batch, self.queries)

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return the stages of the kernel, compiled offline for ``arch`` (``decode.offline.compile_offline``)."""
        return [compile_offline(self.source(), self.config, arch)]


@dataclass(frozen=True)
class PrefillSite:
    """One kernel of the template for many rows, with the sizes that it is rendered for."""

    config: PrefillConfig
    batch: int
    queries: int

    def source(self) -> str:
        """Return the Triton module."""
        return prefill_offline.prefill_source(self.config, self.batch, self.queries)

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return the stages of the kernel, compiled offline for ``arch`` (``prefill.offline.compile_offline``)."""
        return [prefill_offline.compile_offline(self.source(), self.config, arch, self.batch, self.queries)]


@dataclass(frozen=True)
class ChunkedSite:
    """The two kernels of a site with very many query rows, which decodes codes by chunks (``chunked``)."""

    config: PrefillConfig
    batch: int
    queries: int

    @property
    def kernels(self) -> tuple[chunked.ChunkKernel, chunked.ChunkKernel]:
        """The two kernels: one decodes a chunk, one attends to it."""
        return chunked.decoder(self.config), chunked.attender(self.config)

    def source(self) -> str:
        """Return both Triton modules, concatenated."""
        return "\n".join(kernel.source for kernel in self.kernels)

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return ``ttgir``, ``ptx`` and ``cubin`` of each kernel, compiled for ``arch``."""
        return [kernel.compiled(arch) for kernel in self.kernels]


def attends(module: fx.GraphModule) -> list[fx.Node]:
    """Return the attend nodes of a rewritten graph, in order."""
    return list(module.graph.find_nodes(op="call_function", target=ops.attend))


def site_kernel(node: fx.Node, arch: str, hint: Callable[[Any], int]) -> SiteKernel | PrefillSite | ChunkedSite:
    """Return the kernel of one ``attend`` node whose operands carry fake values; ``hint`` turns sizes into plain integers."""
    values_of: Any = fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
    given: AttendOperands[torch.Tensor] = AttendOperands(*values_of[0], **values_of[1])
    q, keys, values, exact_newest, base, rope = given.q, given.keys, given.values, given.exact_newest, given.base, given.rope
    batch, heads, queries, head_dim = (hint(size) for size in q.shape)
    kv_heads = hint(keys[0].shape[2])
    pages = keys[0].shape[0]
    paged = not (isinstance(pages, int) and pages == 1)
    group = heads // kv_heads
    slots = ((given.key_scheme, keys, Role.KEY, head_dim), (given.value_scheme, values, Role.VALUE, hint(given.value_dim)))
    formats = [schemes.parse(text).format(SlotSpec(kv_heads, dim, planes[0].dtype, role)) for text, planes, role, dim in slots]
    scales = [_half(planes, fmt) for (_, planes, _, _), fmt in zip(slots, formats, strict=True)]
    beside = ExtraOperands(
        bool(exact_newest), base is not None and hint(base.shape[0]) != 1, hint(rope[0].shape[2]) if rope else 0,
        bool(given.interleaved), rope is not None and hint(rope[0].shape[0]) != 1,
        hint(given.exact_first[0].shape[3]) if given.exact_first else 0, given.exact_first_at is not None,
    )
    even = all(hint(plane.shape[-1]) % 2 == 0 for plane in scales[0])
    config = AttendConfig(
        given.key_scheme, given.value_scheme, head_dim, hint(given.value_dim), kv_heads, group, q.dtype, keys[0].dtype,
        values[0].dtype, float(given.scale), float(given.softcap), queries == 1, _masks(given, hint), beside, PAGE if paged else 1, paged,
        wide_keys=hint(keys[0].shape[-1]) % 2 == 0, wide_values=hint(values[0].shape[-1]) % 2 == 0,
        key_scale_pack=_scale_pack(scales[0], hint), value_scale_pack=_scale_pack(scales[1], hint),
        key_generic=not formats[0].symmetric and not (scales[0] and (formats[0].levels > 0 or even)),
        value_generic=not formats[1].symmetric and not scales[1],
    )
    rows = queries * group
    many = None
    if rope is None and given.bias is None:
        # The prefill template sums first tokens separately, and masks their codes.
        masks = dataclasses.replace(config.masks, keep=True, keep_per_batch=config.masks.keep_per_batch or given.exact_first_at is not None)
        apart = dataclasses.replace(config, masks=masks) if given.exact_first else config
        many = _many_rows(apart, rows, hint(keys[0].shape[3]) if paged else 1)
    if many is not None:
        tokens, capacity = hint(pages) * hint(keys[0].shape[3]), pages * keys[0].shape[3] if isinstance(pages, int) else None
        cut = choose_cut(many, rows, batch, MULTIPROCESSORS[arch], SHARED_MEMORY[arch], capacity)
        if cut is not None:
            return ChunkedSite(chunked.cut_as(many, cut), batch, queries)
        fitting = prefill_tiles.choose_tiles(many, rows, SHARED_MEMORY[arch], tuned=False) if many.fits else []
        if fitting:
            splits = prefill_tiles.splits_for(fitting[0], rows, batch * kv_heads, MULTIPROCESSORS[arch], tokens)
            splits = max(splits, 2 if given.exact_first or given.log_sums else 1)
            return PrefillSite(fitting[0].with_splits(splits), batch, queries)
    tiled = choose_tiles(config, rows, PAGE if paged else None, tuned=False, shared_memory=SHARED_MEMORY[arch])[0]
    splits = splits_for(tiled, rows, batch * kv_heads, MULTIPROCESSORS[arch], hint(pages) * hint(keys[0].shape[3]))
    splits, shares = ragged_splits(tiled, splits, batch)
    return SiteKernel(tiled.with_splits(splits, writes_directly(tiled, splits) and not given.log_sums, shares), batch, queries)


def _many_rows(config: AttendConfig, rows: int, page_rows: int) -> PrefillConfig | None:
    """Return the attention as the template for many rows takes it; None if rows are few or the template does not support it."""
    if rows < prefill_tiles.FEWEST_ROWS or config.one_query:
        return None
    many = PrefillConfig(
        config.key_scheme, config.value_scheme, config.key_dim, config.value_dim, config.kv_heads, config.group, config.dtype,
        config.key_word, config.value_word, config.scale, config.softcap, config.masks, page_rows, config.paged,
        exact_newest=config.beside.exact_newest, base_per_batch=config.beside.base_per_batch,
    )
    if not many.fits:
        # Tables are decoded by chunks, or not at all by this template.
        return many if many.chunks else None
    # Pairs of words are loaded as one.
    wide = zip(many.slots, (config.wide_keys, config.wide_values), strict=True)
    return many if all(pairs or not slot.scaled for slot, pairs in wide) else None


def _half(planes: Sequence[torch.Tensor], fmt: KernelFormat) -> list[torch.Tensor]:
    """Return scales and zero points if all of them are float16, otherwise an empty list."""
    found = list(planes[1 : 1 + fmt.scaled + fmt.zeros])
    return found if all(plane.dtype == torch.float16 for plane in found) else []


def _scale_pack(planes: list[torch.Tensor], hint: Callable[[Any], int]) -> int:
    """Return how many scales of a row are loaded as one word: all if they are two or four float16, otherwise 1."""
    scales = hint(planes[0].shape[-1]) if planes else 1
    return scales if scales in {2, 4} else 1


def _masks(given: AttendOperands[torch.Tensor], hint: Callable[[Any], int]) -> Masks:
    hi, lo, keep, bias = given.hi, given.lo, given.keep, given.bias

    def varies(value: torch.Tensor | None, axis: int) -> bool:
        return value is not None and hint(value.shape[axis]) != 1

    kind = Bias.NONE if bias is None else Bias.BOOLEAN if bias.dtype == torch.bool else Bias.ADDED
    if given.fill is not None:
        kind = Bias.REPLACING if kind is Bias.BOOLEAN else Bias.ADDED_OR_REPLACING
    return Masks(
        lo is not None, keep is not None, kind, given.sinks is not None, varies(hi, 0), varies(lo, 0), varies(keep, 0),
        varies(bias, 0), varies(bias, 1), varies(bias, 2), given.fill or 0.0,
    )
