"""Inductor's lowering of ``kvcompile::certified_site``: its kernels as one node on CUDA, else the operation as it is."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import fallback_handler

from kvcompile.lowering.certified.site_op import certified_site, site_by_kernels, site_gap
from kvcompile.lowering.host.buffers import equals, realize
from kvcompile.lowering.host.launch_node import lower_launches, stand_in
from kvcompile.lowering.host.launches import Launcher

log = logging.getLogger(__name__)


def lower_certified_site(
    q: Any, keys: list, values: list, hi: Any, lo: Any, keep: Any, bias: Any, sinks: Any, key_scheme: str, value_scheme: str, scale: float,
    softcap: float, value_dim: Any, recent: list, base: Any, telemetry: Any, places: Any = None, scratch: Any = None,
) -> Any:
    """The result of a site as a box; operands as ``site_op`` has them. Logs why CUDA is left with the definition."""
    if q.get_device().type == "cuda":
        q, recent = _rows(q), [_rows(x) for x in recent]
        fakes = ([stand_in(realize(x)) for x in each] for each in ([q], keys, values, recent))
        (query,), key_planes, value_planes, newest = fakes
        gap = site_gap(query, key_planes, value_planes, keep, bias, key_scheme, softcap, value_dim, newest)
        if gap is None:
            operands = [q, keys, values, hi, lo, sinks, key_scheme, scale, value_dim, recent, base, telemetry, places, scratch]
            return lower_launches(_launches, operands, [box for box in (telemetry, places, scratch) if box is not None])[0]
        log.warning("certified attention runs its definition, which reads everything at every step: found %s", gap)
    return fallback_handler(certified_site)(
        q, keys, values, hi, lo, keep, bias, sinks, key_scheme, value_scheme, scale, softcap, value_dim, recent, base, telemetry, places,
        scratch,
    )


def _launches(launcher: Launcher, *operands: Any) -> list[torch.Tensor]:
    return [site_by_kernels(launcher, *operands)]


def _rows(x: Any) -> Any:
    """An operand whose channels lie one after the other, as the kernels take it; mostly it does already."""
    return x if equals(realize(x).get_stride()[-1], 1) else ExternKernel.require_contiguous(x)
