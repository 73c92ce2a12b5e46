"""Attention plugins: kernels of schemes with an attention operation of their own instead of ``attend``.

A scheme names its plugin's module in ``Scheme.kernels``; the module defines the scheme's operation and a constant ``PLUGIN``.
Inductor's lowerings, the appends on CUDA, ``explain`` and ``dump`` ask the plugins of the schemes in use, so that no other module
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
    """A scheme's own append kernel for one slot or two.

    In a plugin: for ``append_window`` of one token; slots are ``append.window_token.WindowSlot``. From ``Scheme.append_kernel``: for
    ``append`` with a constant plane; a slot is the operands of ``append_own_kernel``.
    """

    fits: Callable[[Any], bool]
    """Return whether the kernel supports the append of a slot of its scheme."""
    run: Callable[..., list[torch.Tensor]]
    """Run the append of slots by a launcher; returns the newest tokens of each slot, an empty list for ``append``."""


@dataclass(frozen=True)
class AttentionPlugin:
    """A scheme's attention operation with its lowering, the text that ``explain`` prints for it, and its append kernel."""

    operation: OpOverload
    lower: Callable[..., Any]
    """Inductor's lowering of the operation; it imports Inductor when it is called."""
    runs: Callable[[str, bool], str]
    """Return, for (device, compiled), the text that ``explain`` prints: the code that runs the operation, and why its kernels cannot."""
    append: AppendKernel | None = None


_DEFINED: dict[str, AttentionPlugin] = {}
"""Plugins whose operations are defined, by module name."""


def _plugin_at(module: str) -> AttentionPlugin:
    if module not in _DEFINED:
        _DEFINED[module] = importlib.import_module(module).PLUGIN
    return _DEFINED[module]


def plugin_of(scheme: str) -> AttentionPlugin | None:
    """Return the plugin of a scheme by its text, None if its attention is ``attend``; the first call defines the plugin's operation."""
    module = schemes.parse(scheme).kernels
    return None if module is None else _plugin_at(module)


def plugins(wanted: Iterable[Scheme] = ()) -> tuple[AttentionPlugin, ...]:
    """Return the plugins of ``wanted`` schemes and of all loaded schemes; defines the operations of new ones."""
    known: list[Scheme | type[Scheme]] = [*wanted, *schemes.loaded()]
    for scheme in known:
        if scheme.kernels is not None:
            _plugin_at(scheme.kernels)
    return tuple(_DEFINED.values())


@functools.cache
def _append_at(module: str) -> AppendKernel:
    return importlib.import_module(module).APPEND  # type: ignore[no-any-return]


def append_of(scheme: str) -> AppendKernel | None:
    """Return the kernel that a scheme, given by its text, has for ``append`` with its constant plane; None if it has none."""
    module = schemes.parse(scheme).append_kernel
    return None if module is None else _append_at(module)


def own_append(slots: Sequence[Any]) -> AppendKernel | None:
    """Return the append kernel of the plugin that all slots share; None, so that other code appends, if they have no plugin or several."""
    found = {plugin_of(slot.scheme) for slot in slots}
    (plugin,) = found if len(found) == 1 else (None,)
    return None if plugin is None else plugin.append
