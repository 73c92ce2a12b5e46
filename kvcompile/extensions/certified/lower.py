"""Inductor's lowering of ``kvcompile::certified_site``: its kernels as one node on CUDA, else a call of the operation's eager body."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvcompile.extensions.certified.site_op import SiteOperands, certified_site, site_by_kernels, site_gap
from kvcompile.lowering.host.buffers import channels_together, is_box, realize
from kvcompile.lowering.host.inductor_api import fallback_handler
from kvcompile.lowering.host.launch_node import lower_launches, stand_in
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.host.torch_api import tree_map
from kvcompile.lowering.ops.operands import named, names_of

log = logging.getLogger(__name__)

WRITTEN = ("telemetry", "places", "scratch", "value_places", "value_scratch")
"""The operands that kernels write."""


def lower_certified_site(*args: Any, **kwargs: Any) -> Any:
    """Add a call of ``certified_site`` with these operands to Inductor's graph, by kernels if they support it; return its result, a box.

    Logs the reason if a call on CUDA runs the eager body.
    """
    given = named(certified_site, args, kwargs)
    if given["q"].get_device().type == "cuda":
        given = {**given, "q": channels_together(given["q"]), "exact_newest": [channels_together(x) for x in given["exact_newest"]]}
        # ``site_gap`` checks only whether there is a mask, so masks need no fake tensor.
        planes = ("q", "keys", "values", "exact_newest")
        fakes = {name: tree_map(lambda box: stand_in(realize(box)), given[name], is_leaf=is_box) for name in planes}
        gap = site_gap(SiteOperands.of((), {**given, **fakes}))
        if gap is None:
            # The kernels support no masks.
            operands = {name: operand for name, operand in given.items() if name not in {"keep", "bias"}}
            written = [given[name] for name in WRITTEN if given.get(name) is not None]
            return lower_launches(_launches, [operands], written)[0]
        log.warning(
            "certified attention runs in eager PyTorch, which reads all keys and values in full precision at every step, as its kernels "
            "do not support: %s", gap,
        )
    return fallback_handler(certified_site)(*(given.get(name) for name in names_of(certified_site)))


def _launches(launcher: Launcher, operands: dict[str, Any]) -> list[torch.Tensor]:
    return [site_by_kernels(launcher, SiteOperands.of((), {"keep": None, "bias": None, **operands}))]
