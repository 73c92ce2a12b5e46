"""Attention plugins: the kernels that schemes bring for an attention of their own, which is not ``attend``.

A scheme names its plugin's module in ``Scheme.kernels``, and that module defines the scheme's operation and a constant ``PLUGIN``.
Inductor's lowerings, the appends on CUDA, ``explain`` and ``dump`` ask the plugins of schemes that are in use, so that no other module
knows a scheme.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.lowering.host.torch_api import OpOverload
from kvcompile.schemes import Scheme


@dataclass(frozen=True)
class AppendKernel:
    """A kernel of one scheme's own for one slot or two of an append.

    Of a plugin: for ``append_window`` of one token; slots are ``append.window_token.WindowSlot``. Of ``Scheme.append_kernel``: for
    ``append`` with a constant plane; a slot is the operands of ``append_own_kernel``.
    """

    fits: Callable[[Any], bool]
    """Whether the kernel knows the append of a slot of its scheme."""
    run: Callable[..., list[torch.Tensor]]
    """The newest tokens of each slot, none of ``append``, from slots and a launcher."""


@dataclass(frozen=True)
class AttentionPlugin:
    """The operation of a scheme's attention with what compiles and describes it."""

    operation: OpOverload
    lower: Callable[..., Any]
    """Inductor's lowering of the operation; it imports Inductor when it is called."""
    runs: Callable[[str, bool], str]
    """What runs the operation on a device, with the reason where its kernels cannot, as ``explain`` prints it; compiled or not."""
    append: AppendKernel | None = None


_DEFINED: dict[str, AttentionPlugin] = {}
"""The plugins whose operations are defined, by their modules."""


def _plugin_at(module: str) -> AttentionPlugin:
    if module not in _DEFINED:
        _DEFINED[module] = importlib.import_module(module).PLUGIN
    return _DEFINED[module]


def plugin_of(scheme: str) -> AttentionPlugin | None:
    """The plugin of a scheme by its text, None where its attention is ``attend``; the first call defines the plugin's operation."""
    module = schemes.parse(scheme).kernels
    return None if module is None else _plugin_at(module)


def plugins(wanted: Iterable[Scheme] = ()) -> tuple[AttentionPlugin, ...]:
    """The plugins of ``wanted`` schemes and of all that were asked for so far; the call defines the operations of those that are new."""
    known: list[Scheme | type[Scheme]] = [*wanted, *schemes.loaded()]
    for scheme in known:
        if scheme.kernels is not None:
            _plugin_at(scheme.kernels)
    return tuple(_DEFINED.values())


@functools.cache
def _append_at(module: str) -> AppendKernel:
    return importlib.import_module(module).APPEND  # type: ignore[no-any-return]


def append_of(scheme: str) -> AppendKernel | None:
    """The kernel that a scheme, by its text, brings for ``append`` with its constant plane; None where it has none."""
    module = schemes.parse(scheme).append_kernel
    return None if module is None else _append_at(module)


def own_append(slots: Sequence[Any]) -> AppendKernel | None:
    """The append kernel of the one plugin that all slots have, None where they have none or several."""
    found = {plugin_of(slot.scheme) for slot in slots}
    (plugin,) = found if len(found) == 1 else (None,)
    return None if plugin is None else plugin.append
