"""Names of Inductor that are asked before a graph is lowered, each once. All were seen in torch 2.11, 2.12 and 2.13.

    ``config``                options of a compilation; the one for divisions has moved between versions
    ``list_mode_options``     the options that each of torch.compile's modes stands for
    ``cache_dir``             the folder beside which we keep what holds for a machine
    ``module_key``, ``forget_module``  the name of a module in that folder by its text; Inductor's memory of one that it read
    ``CustomGraphPass``       a pass whose ``uuid`` is part of the key of Inductor's cache on disk

Importing this module imports no lowering and no kernel of Inductor's, so that making a backend does not: they come with the first graph.
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
    """The folder of Inductor's caches on disk."""
    from torch._inductor.runtime.runtime_utils import cache_dir as inductors

    return str(inductors())


def compile_by_inductor(module: fx.GraphModule, fakes: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph by ``compile_fx``, which is imported only here: it brings every pass with it."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, list(fakes), config_patches=patches)  # type: ignore[return-value]


def compile_for_training(module: fx.GraphModule, fakes: Sequence[Any], memory_budget: float) -> Callable[..., Any]:
    """Compile a graph with its backward pass by ``compile_fx``; ``memory_budget``: the share of activations that is kept for it."""
    from torch._functorch import config as partitioner

    # Those passes look for calls of torch, and the graph is ATen.
    with partitioner.patch(activation_memory_budget=memory_budget):
        return compile_by_inductor(module, fakes, {"use_pre_grad_passes": False, **exact_division()})


def module_key(text: str) -> str:
    """The name, but for its suffix, of the file that Inductor writes a module of this text into."""
    from torch._inductor.codecache import code_hash

    return code_hash(text.strip())


def forget_module(path: Path) -> None:
    """Let Inductor read a module from its file again where it did before."""
    from torch._inductor.codecache import PyCodeCache

    PyCodeCache.modules_no_attr.pop(str(path), None)


def uncached() -> AbstractContextManager[None]:
    """Let Inductor take no code from its caches, and put none there."""
    return config.patch({"force_disable_caches": True})  # type: ignore[no-any-return]


def exact_division() -> dict[str, Any]:
    """Inductor's option that rounds quotients as eager code does: codes are made from them. The option has moved between versions."""
    return {"eager_numerics.division_rounding" if hasattr(config, "eager_numerics") else "emulate_divison_rounding": True}


def written_modules(build: Callable[[], Any]) -> list[str]:
    """The source of every module that is written while ``build`` runs."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(build)
    return list(sources)
