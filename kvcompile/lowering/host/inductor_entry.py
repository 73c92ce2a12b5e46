"""Private names of Inductor that are needed before a graph is lowered, each used only here. All exist in torch 2.11, 2.12 and 2.13.

    ``config``                options of a compilation; the one for divisions has moved between versions
    ``list_mode_options``     the options of each of torch.compile's modes
    ``cache_dir``             Inductor's cache folder; our persistent keys are in it too
    ``module_key``, ``forget_module``  the file name of a module in that folder, by its text; drops a module that Inductor has loaded
    ``CustomGraphPass``       a pass whose ``uuid`` is part of the key of Inductor's cache on disk

Importing this module imports none of Inductor's lowerings and kernels, so making a backend is cheap; the first graph imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor import config, list_mode_options
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = [
    "CustomGraphPass", "cache_dir", "compile_by_inductor", "compile_for_training", "config", "exact_division", "forget_module",
    "list_mode_options", "module_key", "uncached", "written_modules",
]


def cache_dir() -> str:
    """Return the folder of Inductor's caches on disk."""
    from torch._inductor.runtime.runtime_utils import cache_dir as inductors

    return str(inductors())


def compile_by_inductor(module: fx.GraphModule, fakes: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Return the code of a graph, compiled by ``compile_fx`` for arguments like ``fakes``, with ``patches`` of Inductor's config.

    Only here is ``compile_fx`` imported, which loads every pass.
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, list(fakes), config_patches=patches)  # type: ignore[return-value]


def compile_for_training(module: fx.GraphModule, fakes: Sequence[Any], memory_budget: float) -> Callable[..., Any]:
    """Return the code of a graph, compiled with its backward pass for arguments like ``fakes``.

    ``memory_budget``: share of activations (0 to 1) that is kept for the backward pass.
    """
    from torch._functorch import config as partitioner

    # Pre-grad passes look for calls of torch, and the graph is ATen.
    with partitioner.patch(activation_memory_budget=memory_budget):
        return compile_by_inductor(module, fakes, {"use_pre_grad_passes": False, **exact_division()})


def module_key(text: str) -> str:
    """Return the name, without suffix, of the file into which Inductor writes a module with this text."""
    from torch._inductor.codecache import code_hash

    return code_hash(text.strip())


def forget_module(path: Path) -> None:
    """Drop a module from Inductor's memory, so that it is read from its file again."""
    from torch._inductor.codecache import PyCodeCache

    PyCodeCache.modules_no_attr.pop(str(path), None)


def uncached() -> AbstractContextManager[None]:
    """Return a context in which Inductor neither reads nor writes its caches."""
    return config.patch({"force_disable_caches": True})  # type: ignore[no-any-return]


def exact_division() -> dict[str, Any]:
    """Return Inductor's option for quotients rounded as in eager code, which codes are made from. Its name depends on the version."""
    return {"eager_numerics.division_rounding" if hasattr(config, "eager_numerics") else "emulate_divison_rounding": True}


def written_modules(build: Callable[[], Any]) -> list[str]:
    """Return the source of every module that Inductor writes while ``build`` runs."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(build)
    return list(sources)
