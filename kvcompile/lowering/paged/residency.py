"""The number of programs of a compiled kernel that run on a multiprocessor at a time.

The registers of a kernel are known once it is compiled, and differ between versions of Triton. A launch with one program more than run at a
time takes twice as long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

MOST_BLOCKS = 32
"""The most programs on a multiprocessor, however little they need."""
REGISTER_UNIT = 256
"""Registers are allocated to a warp in multiples of this number."""
RESERVED = 1024
"""Bytes of shared memory that the driver takes for each program."""


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """The resources of one multiprocessor that its programs share: registers, bytes of shared memory, warps."""

    registers: int
    shared: int
    warps: int

    @staticmethod
    def of(device: torch.device) -> Multiprocessor:
        """Return the resources of a multiprocessor of a CUDA device."""
        found: Any = torch.cuda.get_device_properties(device)
        return Multiprocessor(
            found.regs_per_multiprocessor, found.shared_memory_per_multiprocessor, found.max_threads_per_multi_processor // found.warp_size
        )


def programs_at_a_time(registers: int, shared: int, warps: int, found: Multiprocessor) -> int:
    """Return how many programs run on a multiprocessor at a time, at least one.

    ``registers``: number of registers of a thread; ``shared``: bytes of shared memory of a program; ``warps``: number of warps of a
    program.
    """
    of_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return max(1, min(found.registers // (of_a_warp * warps), found.shared // (shared + RESERVED), found.warps // warps, MOST_BLOCKS))


def resident(kernel: Any, operands: tuple[Any, ...], options: dict[str, int], found: Multiprocessor) -> int:
    """Return how many programs of a Triton function run on a multiprocessor at a time.

    Compiles and loads the function for ``operands`` and ``options``; does not launch it.
    """
    compiled = kernel.warmup(*operands, grid=(1,), **options)
    compiled._init_handles()
    return programs_at_a_time(compiled.n_regs, compiled.metadata.shared, options["num_warps"], found)
