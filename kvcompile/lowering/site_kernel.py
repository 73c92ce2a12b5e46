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
from kvcompile.lowering.decode.offline import attend_source, compile_offline
from kvcompile.lowering.decode.site import Machine, config_of, cut, nodes_of
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import TensorSizes
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
        """Return the stages of the kernel, compiled offline for ``arch`` (``decode.offline.compile_offline``)."""
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
    sizes, machine = TensorSizes(hint), Machine(MULTIPROCESSORS[arch], SHARED_MEMORY[arch])
    many = None
    if any(kernel is PREFILL for kernel, _ in kernels_for(facts_for(given, sizes, "cuda"))):
        many = _many_rows(given, sizes, machine)
    if many is not None:
        return many
    config = cut(config_of(given, nodes_of(given, sizes), sizes), given, machine, sizes)[0]
    return SiteKernel(config, hint(given.q.shape[0]), hint(given.q.shape[2]))


def _many_rows(given: AttendOperands[torch.Tensor], sizes: TensorSizes, machine: Machine) -> PrefillSite | ChunkedSite | None:
    """Return the kernel of the template for many rows, None if it does not support the operands' strides or schemes."""
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
