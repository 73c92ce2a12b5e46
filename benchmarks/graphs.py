"""A function compiled as the backend compiles a rewritten graph, without the model around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.lowering import compile as lowering
from kvcompile.settings import Settings


def compiled(run: Callable[..., Any], arguments: list[torch.Tensor]) -> Callable[..., Any]:
    """``run``, which returns a list, compiled anew for arguments like these."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in arguments]
    with mode:
        module = make_fx(run)(*fakes)
    with torch.no_grad():
        return lowering.compile_graph(module, fakes, mode, Settings(options={"force_disable_caches": True}))
