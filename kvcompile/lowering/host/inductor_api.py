"""Names of Inductor that lowerings use, each once; none is public. All were seen in torch 2.11, 2.12 and 2.13.

    ``register_lowering``, ``fallback_handler``, ``lowerings``  give an operator a lowering, call it as it is, call another one's
    ``ir``, ``V``             nodes of the graph that is lowered, and the graph and its sizes as the lowering of the moment has them
    ``virtual_ops``           what a node computes of an element, as nodes of our own say it
    ``ceildiv``               a quotient of sizes, rounded up
    ``convert_shape_to_symint``  sizes of a node as sizes of a fake tensor
    ``TritonTemplate``, ``SymbolicGridFn``  a Triton kernel from a template, with its grid
    ``autotune_select_algorithm``  chooses among configurations (``autotuned``); 2.12 began to return the choice beside the node
    ``CppTemplate``, ``CppTemplateKernel``, ``cexpr_index``, ``Placeholder``, ``parallel_num_threads``  a C++ kernel from a template

Importing this module imports most of Inductor; ``inductor_entry`` has what is asked before a graph is lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

# Inductor's modules import one another in a circle, which has to be entered through that one.
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
    """The node of the best of some configurations of a template; ``examples``: makers of inputs to time them with, by their place."""
    chosen = autotune_select_algorithm(name, choices, inputs, layout, input_gen_fns=examples)
    # torch 2.12 began to return the choice beside the node.
    return chosen[0] if isinstance(chosen, tuple) else chosen
