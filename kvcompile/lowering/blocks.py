"""``attend_blocks`` in a graph compiled for CUDA: the kernel that reads a pool's blocks in place, or else ``gather`` and ``attend``."""

from __future__ import annotations

from typing import Any

import torch

from kvcompile.lowering.attend_kernels import blocks_gap, facts_for
from kvcompile.lowering.ops.attend_blocks import BlockOperands
from kvcompile.lowering.ops.operations import attend_blocks_body
from kvcompile.lowering.ops.sizes import TensorSizes
from kvcompile.lowering.paged.store import attend_blocks_triton, rows_of


def attend_blocks_traced(*arguments: Any) -> torch.Tensor:
    """Run ``attend_blocks`` in a compiled graph, by a kernel or, if ``blocks_gap`` has a reason, by its body; return [B, H, 1, Dv]."""
    given: BlockOperands[torch.Tensor] = BlockOperands(*arguments)
    facts = facts_for(given.over(given.keys, given.values, given.hi, None), TensorSizes(), given.q.device.type)
    if blocks_gap(facts) is not None:
        return attend_blocks_body(*arguments)
    rows = rows_of(given)
    found: torch.Tensor = attend_blocks_triton(
        given.q, list(given.keys), list(given.values), rows.first, given.every, rows.lengths, rows.starts, given.window, given.sinks,
        given.key_scheme, given.value_scheme, given.scale, given.softcap, given.value_dim,
    )
    return found
