"""Private names of Inductor that lowerings use, each imported only here. All exist in torch 2.11, 2.12 and 2.13.

    ``register_lowering``, ``fallback_handler``, ``lowerings``  register an operator's lowering, call its eager body, call another lowering
    ``ir``, ``V``             nodes of the graph that is being lowered; that graph and its sizes
    ``virtual_ops``           elementwise operations for nodes of our own
    ``ceildiv``               a quotient of sizes, rounded up
    ``convert_shape_to_symint``  sizes of a node as sizes of a fake tensor
    ``TritonTemplate``, ``SymbolicGridFn``  a Triton kernel from a template, with its grid
    ``autotune_select_algorithm``  chooses among configurations (``autotuned``); from 2.12 on it returns (node, choice)
    ``CppTemplate``, ``CppTemplateKernel``, ``cexpr_index``, ``Placeholder``, ``parallel_num_threads``  a C++ kernel from a template

Importing this module imports most of Inductor; ``inductor_entry`` has the names that are needed before a graph is lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

# Inductor's modules import one another in a circle, which must be entered through ``lowering``.
# isort: split
from torch._inductor import config, ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, autotune_select_algorithm
from torch._inductor.utils import Placeholder, ceildiv, convert_shape_to_symint, parallel_num_threads
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as virtual_ops

__all__ = [
    "CppTemplate", "CppTemplateKernel", "Placeholder", "SymbolicGridFn", "TritonTemplate", "V", "autotune_select_algorithm", "autotuned",
    "ceildiv", "cexpr_index", "config", "convert_shape_to_symint", "fallback_handler", "ir", "lowerings", "parallel_num_threads",
    "register_lowering", "virtual_ops",
]


def autotuned(name: str, choices: list[Any], inputs: list[Any], layout: Any, examples: dict[int, Callable[[Any], Any]]) -> Any:
    """Return the node of a template's fastest configuration; ``examples``: makers of the inputs to time with, by input index."""
    chosen = autotune_select_algorithm(name, choices, inputs, layout, input_gen_fns=examples)
    # From torch 2.12 on, (node, choice).
    return chosen[0] if isinstance(chosen, tuple) else chosen
