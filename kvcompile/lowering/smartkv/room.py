"""The room of the scheme smartkv: its operation, which runs as it is defined."""

from __future__ import annotations

from typing import Any

from kvcompile.lowering.ops.operands import named, names_of
from kvcompile.lowering.rooms import Room
from kvcompile.lowering.smartkv.attend import smartkv_attend


def _lower(*operands: Any, **keywords: Any) -> Any:
    from kvcompile.lowering.host.inductor_api import fallback_handler

    given = named(smartkv_attend, operands, keywords)
    return fallback_handler(smartkv_attend)(*(given.get(name) for name in names_of(smartkv_attend)))


def _runs(device: str, compiled: bool) -> str:
    del device, compiled
    return "eager body: it has no kernels yet"


ROOM = Room(smartkv_attend, _lower, _runs)
