"""Names of Inductor that the lowering uses, each once; none is public. All were seen in torch 2.11, 2.12 and 2.13.

    ``config``                options of a compilation; the one for divisions has moved between versions (``compile`` asks which there is)
    ``cache_dir``             the folder beside which we keep what holds for a machine
    ``module_key``, ``forget_module``  the name of a module in that folder by its text; Inductor's memory of one that it read
    ``CustomGraphPass``       a pass whose ``uuid`` is part of the key of Inductor's cache on disk
    ``register_lowering``, ``fallback_handler``, ``lowerings``  give an operator a lowering, call it as it is, call another one's
    ``ir``, ``V``             nodes of the graph that is lowered, and the graph and its sizes as the lowering of the moment has them
    ``virtual_ops``           what a node computes of an element, as nodes of our own say it
    ``ceildiv``               a quotient of sizes, rounded up
    ``convert_shape_to_symint``  sizes of a node as sizes of a fake tensor
    ``TritonTemplate``, ``SymbolicGridFn``  a Triton kernel from a template, with its grid
    ``autotune_select_algorithm``  chooses among configurations (``autotuned``); 2.12 began to return the choice beside the node
    ``CppTemplate``, ``CppTemplateKernel``, ``cexpr_index``, ``Placeholder``, ``parallel_num_threads``  a C++ kernel from a template

Importing this module imports most of Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

# Inductor's modules import one another in a circle, which has to be entered through that one.
# isort: split
from torch._inductor import config, ir, list_mode_options
from torch._inductor.codecache import PyCodeCache, code_hash
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm
from torch._inductor.utils import Placeholder, ceildiv, convert_shape_to_symint, parallel_num_threads
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as virtual_ops

__all__ = [
    "CppTemplate", "CppTemplateKernel", "CustomGraphPass", "Placeholder", "SymbolicGridFn", "TritonTemplate", "V",
    "autotune_select_algorithm", "autotuned", "cache_dir", "ceildiv", "cexpr_index", "compile_by_inductor", "config",
    "convert_shape_to_symint", "fallback_handler", "forget_module", "ir", "list_mode_options", "lowerings", "module_key",
    "parallel_num_threads", "register_lowering", "virtual_ops", "written_modules",
]


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
    return code_hash(text.strip())


def forget_module(path: Path) -> None:
    """Let Inductor read a module from its file again where it did before."""
    PyCodeCache.modules_no_attr.pop(str(path), None)


def exact_division() -> dict[str, Any]:
    """Inductor's option that rounds quotients as eager code does: codes are made from them. The option has moved between versions."""
    return {"eager_numerics.division_rounding" if hasattr(config, "eager_numerics") else "emulate_divison_rounding": True}


def autotuned(name: str, choices: list[Any], inputs: list[Any], layout: Any, examples: dict[int, Callable[[Any], Any]]) -> Any:
    """The node of the best of some configurations of a template; ``examples``: makers of inputs to time them with, by their place."""
    chosen = autotune_select_algorithm(name, choices, inputs, layout, input_gen_fns=examples)
    # torch 2.12 began to return the choice beside the node.
    return chosen[0] if isinstance(chosen, tuple) else chosen


def written_modules(build: Callable[[], Any]) -> list[str]:
    """The source of every module that is written while ``build`` runs."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(build)
    return list(sources)
