"""Inductor's lowering of ``kvcompile::smartkv_attend``: its kernels as one node on CUDA, else a call of the operation's eager body."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvcompile.extensions.smartkv.attend import smartkv_attend
from kvcompile.extensions.smartkv.decode_step import DecodeStepOperands, step_by_kernels, step_gap
from kvcompile.lowering.host.buffers import channels_together, is_box, realize
from kvcompile.lowering.host.inductor_api import fallback_handler
from kvcompile.lowering.host.launch_node import lower_launches, stand_in
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.host.torch_api import tree_map
from kvcompile.lowering.ops.operands import attend_operands, named, names_of

log = logging.getLogger(__name__)


def lower_smartkv(*args: Any, **kwargs: Any) -> Any:
    """Add a call of ``smartkv_attend`` with these operands to Inductor's graph, by kernels if they support it; return its result, a box.

    Logs the reason if a call on CUDA runs the eager body.
    """
    given = named(smartkv_attend, args, kwargs)
    if given["q"].get_device().type == "cuda":
        given = {**given, "q": channels_together(given["q"])}
        gap = step_gap(_step(tree_map(lambda box: stand_in(realize(box)) if is_box(box) else box, given, is_leaf=is_box)))
        if gap is None:
            return lower_launches(_launches, [given], [given["importance"], given["heads"]])[0]
        log.debug("smartkv attention runs in eager PyTorch, as its kernels do not support: %s", gap)
    return fallback_handler(smartkv_attend)(*(given.get(name) for name in names_of(smartkv_attend)))


def _step(given: dict[str, Any]) -> DecodeStepOperands:
    return DecodeStepOperands(attend_operands(given), given["importance"], given["heads"])


def _launches(launcher: Launcher, given: dict[str, Any]) -> list[torch.Tensor]:
    return [step_by_kernels(launcher, _step(given))]
