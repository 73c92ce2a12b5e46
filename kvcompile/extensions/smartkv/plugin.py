"""The attention plugin of the scheme smartkv: its operation and that operation's lowering."""

from __future__ import annotations

from typing import Any

from kvcompile.extensions.smartkv.attend import smartkv_attend
from kvcompile.extensions.smartkv.decode_step import QUERIES
from kvcompile.lowering.attention_plugins import AttentionPlugin


def _lower(*operands: Any, **keywords: Any) -> Any:
    from kvcompile.extensions.smartkv.lower import lower_smartkv

    return lower_smartkv(*operands, **keywords)


def _runs(device: str, compiled: bool) -> str:
    if device == "cuda":
        return f"its kernels for up to {QUERIES} queries, their eager body for more"
    return "eager body: its kernels are for CUDA"


PLUGIN = AttentionPlugin(smartkv_attend, _lower, _runs)
