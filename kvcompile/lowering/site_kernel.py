"""The attend kernel that a site of a rewritten graph gets on a GPU, chosen on a machine without one.

Makes the choices of Inductor's lowerings (``attend_kernels``, ``decode.site``, ``prefill.site``) from the fake values of an ``attend``
node instead of Inductor's buffers, and for a named architecture instead of a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.attend_kernels import PREFILL, facts_for, kernels_for
from kvcompile.lowering.decode.config import AttendConfig
from kvcompile.lowering.decode.offline import Operand, attend_source, compile_offline, compile_rendered
from kvcompile.lowering.decode.site import Machine, config_of, cut, nodes_of
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.attend_blocks import BlockOperands
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import TensorSizes
from kvcompile.lowering.paged.config import PagedConfig, paged_config
from kvcompile.lowering.paged.store import attend_of, rows_of
from kvcompile.lowering.prefill import chunked
from kvcompile.lowering.prefill import offline as prefill_offline
from kvcompile.lowering.prefill import site as prefill_site
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.site import loadable, many_rows
from kvcompile.lowering.prefill.tiles import choose_cut, choose_tiles, splits_for

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
        """Return the kernel's Triton module as source text."""
        return attend_source(self.config, self.batch, self.queries)

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return a list of one dict, the kernel's ``ttgir``, ``ptx`` and ``cubin``, compiled for ``arch`` ("sm_90") without a device.

        Raises OfflineCompilation for an unknown architecture.
        """
        return [compile_offline(self.source(), self.config, arch)]


@dataclass(frozen=True)
class PrefillSite:
    """One kernel of the template for many rows, with the sizes that it is rendered for."""

    config: PrefillConfig
    batch: int
    queries: int

    def source(self) -> str:
        """Return the kernel's Triton module as source text."""
        return prefill_offline.prefill_source(self.config, self.batch, self.queries)

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return a list of one dict, the kernel's ``ttgir``, ``ptx`` and ``cubin``, compiled for ``arch`` ("sm_90") without a device.

        Raises OfflineCompilation for an unknown architecture.
        """
        return [prefill_offline.compile_offline(self.source(), self.config, arch, self.batch, self.queries)]


@dataclass(frozen=True)
class ChunkedSite:
    """The two kernels of a site with very many query rows: one decodes a chunk of tokens, one attends to it (``chunked``)."""

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


@dataclass(frozen=True)
class BlocksSite:
    """The kernel of a site that reads a pool's blocks in place, without the merge kernel; ``operands``: sizes and strides by name."""

    config: PagedConfig
    operands: tuple[tuple[str, Operand], ...]
    batch: int
    queries: int = 1

    def source(self) -> str:
        """Return the kernel's Triton module as source text."""
        from kvcompile.lowering.paged.attend import paged_source

        return paged_source(self.config, dict(self.operands))

    def compiled(self, arch: str) -> list[dict[str, str | bytes]]:
        """Return a list of one dict, the kernel's ``ttgir``, ``ptx`` and ``cubin``, compiled for ``arch`` ("sm_90") without a device.

        Raises OfflineCompilation for an unknown architecture.
        """
        sums = Operand((1,), (1,), torch.float32)
        return [compile_rendered(self.source(), dict(self.operands), sums, self.config.tile, arch)]


Kernel = SiteKernel | PrefillSite | ChunkedSite | BlocksSite


def attends(module: fx.GraphModule) -> list[fx.Node]:
    """Return the attend nodes of a rewritten graph, in order."""
    return [node for node in module.graph.nodes if node.target in {ops.attend, ops.attend_blocks}]


def site_kernel(node: fx.Node, arch: str, hint: Callable[[Any], int]) -> Kernel:
    """Return the kernel of one attend node whose operands carry fake values; ``hint`` turns sizes into plain integers."""
    values_of: Any = fx.node.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
    if node.target is ops.attend_blocks:
        return _in_place(BlockOperands(*values_of[0]), Machine(MULTIPROCESSORS[arch], SHARED_MEMORY[arch]), hint)
    given: AttendOperands[torch.Tensor] = AttendOperands(*values_of[0], **values_of[1])
    sizes, machine = TensorSizes(hint), Machine(MULTIPROCESSORS[arch], SHARED_MEMORY[arch])
    many = None
    if any(kernel is PREFILL for kernel, _ in kernels_for(facts_for(given, sizes, "cuda"))):
        many = _many_rows(given, sizes, machine)
    if many is not None:
        return many
    config = cut(config_of(given, nodes_of(given, sizes), sizes), given, machine, sizes)[0]
    return SiteKernel(config, hint(given.q.shape[0]), hint(given.q.shape[2]))


def _in_place(given: BlockOperands[torch.Tensor], machine: Machine, hint: Callable[[Any], int]) -> BlocksSite:
    """Return the kernel of one ``attend_blocks`` whose operands are fake tensors; ``hint`` turns sizes into plain integers."""
    from kvcompile.lowering.paged.attend import operands_of, sizes_of

    def sized(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty([hint(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")

    fixed = dataclasses.replace(
        given, q=sized(given.q), keys=list(map(sized, given.keys)), values=list(map(sized, given.values)), table=sized(given.table),
        hi=sized(given.hi), sinks=None if given.sinks is None else sized(given.sinks),
    )
    call = attend_of(fixed, rows_of(fixed))
    config, named = paged_config(call, machine, torch.version.hip is None), operands_of(call)
    return BlocksSite(config, tuple((name, sizes_of(name, named[name])) for name in config.operands), hint(given.q.shape[0]))


def _many_rows(given: AttendOperands[torch.Tensor], sizes: TensorSizes, machine: Machine) -> PrefillSite | ChunkedSite | None:
    """Return the kernel for an attention with many query rows; None if the prefill template does not support its strides or schemes."""
    (batch, _, queries, _), (pages, _, _, page_rows, _) = given.q.shape, given.keys[0].shape
    batch, queries, rows = sizes.hint(batch), sizes.hint(queries), many_rows(given, sizes)
    assert rows is not None
    config = prefill_site.config_of(given, sizes, paged=not sizes.equals(pages, 1))
    if given.exact_first:
        # The prefill template sums first tokens separately, and masks their codes.
        masks = dataclasses.replace(config.masks, keep=True, keep_per_batch=config.masks.keep_per_batch or given.exact_first_at is not None)
        config = dataclasses.replace(config, masks=masks)
    if config.fits and not loadable(config, prefill_site.nodes_of(config, given), sizes):
        return None
    capacity = pages * page_rows if isinstance(pages, int) else None
    how = choose_cut(config, rows, batch, machine.multiprocessors, machine.shared_memory, capacity)
    if how is not None:
        return ChunkedSite(chunked.cut_as(config, how), batch, queries)
    fitting = choose_tiles(config, rows, machine.shared_memory, tuned=False) if config.fits else []
    if not fitting:
        return None
    splits = splits_for(fitting[0], rows, batch * config.kv_heads, machine.multiprocessors, sizes.hint(pages) * sizes.hint(page_rows))
    return PrefillSite(fitting[0].with_splits(max(splits, 2 if given.exact_first or given.log_sums else 1)), batch, queries)
