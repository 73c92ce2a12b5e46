"""Two requests to one compiled module, compared with the uncompiled module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from e2e_models import Case, inputs

CHUNKS = (36, 1, 1, 4, 1, 1)
KIVI = "kivi(bits=4,group=16,window=16)"
ALLOWED = {"dense": 3e-6, "int8": 0.02, KIVI: 0.2}
"""The largest difference that each scheme may make."""


def error(case: Case, backend: Callable[..., Any], dtype: torch.dtype = torch.float32) -> float:
    """The largest difference over two requests to one compiled module; caches are made empty in between."""
    module = case.make(dtype)
    plain, worst = copy.deepcopy(module), 0.0
    run = torch.compile(module, backend=backend, fullgraph=True)
    for seed in (1, 2):
        given = inputs(module, CHUNKS, dtype, seed)
        with torch.no_grad():
            expected, found = case.drive(plain, plain, given), case.drive(module, run, given)
            for cache in (item for item in (*plain.buffers(), *module.buffers()) if item.is_floating_point()):
                cache.zero_()
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)))
    return worst
