"""The attention plugin of the scheme certified: its operation, that operation's lowering, and its append of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.extensions.certified.site_op import certified_site
from kvcompile.lowering.attention_plugins import AppendKernel, AttentionPlugin
from kvcompile.lowering.host.launches import Launcher


def _lower(*operands: Any, **named: Any) -> Any:
    from kvcompile.extensions.certified.lower import lower_certified_site

    return lower_certified_site(*operands, **named)


def _runs(device: str, compiled: bool) -> str:
    if device == "cuda" and compiled:
        return "its kernels where they know the site"
    return "eager body: its kernels are for CUDA"


def _append_fits(slot: Any) -> bool:
    from kvcompile.extensions.certified.append import fits

    return fits(slot)


def _append(slots: Sequence[Any], launcher: Launcher | None = None) -> list[torch.Tensor]:
    from kvcompile.extensions.certified.append import append_certified

    return append_certified(slots, launcher)


PLUGIN = AttentionPlugin(certified_site, _lower, _runs, AppendKernel(_append_fits, _append))
