"""The operation ``kvcompile::attend_gluon``: launches the decode kernel and its merge on the current device.

It takes the operands of ``attend`` that the kernel supports and returns its result. Inductor cannot print a Gluon kernel into its output
module, so the module calls this operation. The number of splits is chosen here, at every call, from the planes' capacity, which the host
knows; a compiled graph does not know it, since stores grow. It changes only the grid, so nothing is compiled again, and nothing waits for
the device, so a CUDA graph can capture the launches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.lowering.gluon.config import GluonConfig, Merge, TileConfig, merge_for, ragged_splits, splits_for
from kvcompile.lowering.gluon.plan import TWICE_HEADS, KeyPlan, ValuePlan, cut_of, key_plan, value_plan
from kvcompile.lowering.ops.kept_tokens import RUN, kept_tokens
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named
from kvcompile.lowering.ops.operations import LIBRARY

LOG2E = 1.4426950408889634

LIBRARY.define(
    "attend_gluon(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? sinks, str key_scheme,"
    " str value_scheme, float scale, int value_dim, Tensor[]? exact_newest, Tensor? base, Tensor? kept=None) -> Tensor"
)


OVERLAPPING = (9, 0)
"""First CUDA capability on which a launch can start before the previous one has ended."""

UNBOUNDED = 1 << 30
"""A capacity in tokens that is beyond that of any store."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts about a device that launches depend on.

    They are its number of multiprocessors, and whether a launch can start before the previous one has ended.
    """

    multiprocessors: int
    overlaps: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch; ``arguments`` in the order of its parameters, constants included."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    warps: int
    early: bool = False
    """Whether the launch may start before the previous one has ended; its kernel then waits for that one's results."""

    def run(self) -> None:
        """Start the kernel on the current device."""
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, **self._options())

    def compile(self) -> None:
        """Compile the kernel for the current device without running it, with dtypes in place of tensors."""
        given = (item.dtype if isinstance(item, torch.Tensor) else item for item in self.arguments)
        self.kernel.warmup(*given, grid=self.grid, num_warps=self.warps, **self._options())

    def _options(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.early else {}


@functools.lru_cache(maxsize=64)
def plans(
    key_scheme: str, value_scheme: str, dim: int, words: tuple[torch.dtype, torch.dtype], few: bool
) -> tuple[TileConfig, KeyPlan, ValuePlan]:
    """Return (tile sizes, plan of the keys, plan of the values) of the Gluon kernel for a pair of schemes.

    ``words``: dtypes of the two planes of words; ``few``: at most TWICE_HEADS query heads per kv head. Raises NoFragments if unsupported.
    """
    key, value = key_plan(key_scheme, dim, words[0]), value_plan(value_scheme, dim, words[1], few)
    return cut_of(key_scheme, value_scheme, dim), key, value


@functools.lru_cache(maxsize=64)
def constants(
    cut: TileConfig, dim: int, kv_heads: int, group: int, page_rows: int, lo: bool, keep: bool, sinks: bool, exact_newest: bool,
    ragged: bool, overlap: bool,
) -> GluonConfig:
    """Return the kernel's compile-time constants for tile sizes ``cut``, a shape and the operands that are given."""
    rows = TWICE_HEADS if group <= TWICE_HEADS else 8
    return GluonConfig(
        dim, kv_heads, group, rows, 1 << (group - 1).bit_length(), cut.warps, cut.tokens, cut.stages, page_rows, lo, keep, sinks,
        exact_newest,
        ragged, overlap,
    )


def launches(
    operands: AttendOperands[torch.Tensor], device: Device, most: int | None = None, merging: Merge | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[Launch, Launch]]:
    """Return the result tensor, and the launches that fill it, in order.

    ``kept``: the mask's counts (``ops.kept_tokens``), computed here if None; ``most``: limit on the number of splits, None for no limit;
    ``merging``: sizes of the merge for benchmarks and tests, None for ``merge_for``'s.
    """
    from kvcompile.lowering.gluon import kernel, merge

    q, hi, lo, keep, base = _dense(operands.q), operands.hi, operands.lo, operands.keep, operands.base
    exact_newest = operands.exact_newest or ()
    keys, values = operands.keys, operands.values
    keep, sinks = (None if x is None else _dense(x) for x in (keep, operands.sinks))
    if keep is not None and kept is None:
        kept = kept_tokens(keep)
    B, H, _, D = q.shape
    pages, _, K, page_rows, _ = keys[0].shape
    group = H // K
    cut, key, value = plans(operands.key_scheme, operands.value_scheme, D, (keys[0].dtype, values[0].dtype), group <= TWICE_HEADS)
    assert cut.tokens % RUN == 0, "a tile would have a part of a run that nobody looks at"
    ragged = B > 1 and (hi.shape[0] > 1 or (lo is not None and lo.shape[0] > 1))
    optional = (lo is not None, keep is not None, sinks is not None, bool(exact_newest))
    overlap = device.overlaps if merging is None else merging.overlap
    config = constants(cut, D, K, group, page_rows, *optional, ragged, overlap)

    def splits_of(capacity: int) -> tuple[int, int]:
        shares = splits_for(cut, B * K, device.multiprocessors, capacity)
        if most is not None:
            shares = min(shares, most)
        return shares, (ragged_splits(shares, B) if ragged else shares) + config.exact_newest

    shares, splits = splits_of(pages * page_rows)
    merging = merging or merge_for(cut, config, B * K, device.multiprocessors, splits_of(UNBOUNDED)[1])
    slots = splits * cut.warps
    out = q.new_empty((B, H, 1, D))
    sums = q.new_empty((B * K, slots, config.kept, D), dtype=torch.float32)
    tops = q.new_empty((B * K, slots, 2, 8), dtype=torch.float32)
    newest = [_dense(x) for x in exact_newest]
    steps = [*newest[0].stride()[:3], *newest[1].stride()[:3]] if exact_newest else [0] * 6
    k_zeros, v_zeros = keys[2] if key.block else None, values[2] if value.zeros else None
    hi_batch, lo_batch, keep_batch, kept_batch, base_batch = (_step(x) for x in (hi, lo, keep, kept, base))
    keep_tokens = 0 if keep is None else keep.shape[1]
    attending = (
        q, hi, lo, keep, kept, keys[0], keys[1], k_zeros, values[0], values[1], v_zeros, *(newest or (None, None)), base, sums, tops,
        q.stride(0), q.stride(1), *steps, hi_batch, lo_batch, keep_batch, kept_batch, base_batch,
        newest[0].shape[2] if exact_newest else 0, B, pages, keep_tokens, shares, operands.scale * LOG2E, key, value, config,
    )
    merged = (
        hi, lo, sinks, base, sums, tops, out, hi_batch, lo_batch, base_batch, B, pages, keep_tokens, slots, shares, config, merging,
    )
    return out, (
        Launch(kernel.attend, (splits, B * K, 1), attending, cut.warps),
        Launch(merge.merge, (D // merging.channels, B * K, 1), merged, merging.warps, merging.overlap),
    )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` itself if the stride of its last axis is 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _step(x: torch.Tensor | None) -> int:
    """Return a tensor's stride between batch rows; 0 for None, and if one row serves the whole batch."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the ``Device`` record of a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(int(properties.multi_processor_count), (properties.major, properties.minor) >= OVERLAPPING)


def given_to(args: Sequence[Any]) -> tuple[AttendOperands[torch.Tensor], torch.Tensor | None]:
    """Return the operands of ``attend`` in the arguments of a call of the Gluon operation, and its counts ``kept``, None if not given."""
    given = named(operation, args, {})
    kept = given.pop("kept", None)
    return attend_operands({**given, "bias": None, "softcap": 0.0}), kept


def _attend_gluon(*args: Any) -> torch.Tensor:
    operands, kept = given_to(args)
    with torch.cuda.device_of(operands.q):
        out, found = launches(operands, device_of(operands.q.device), kept=kept)
        for launch in found:
            launch.run()
    return out


def _attend_gluon_meta(*args: Any) -> torch.Tensor:
    operands, _ = given_to(args)
    return operands.q.new_empty(*operands.q.shape[:3], operands.value_dim)


LIBRARY.impl("attend_gluon", _attend_gluon, "CUDA")
LIBRARY.impl("attend_gluon", _attend_gluon_meta, "Meta")

operation = torch.ops.kvcompile.attend_gluon.default
