"""Private names of torch that passes, runtime, validation and the command line import from here; present in torch 2.11 to 2.13.

Dynamo
    ``ConstantSource``      source of a symbolic size that no program argument has: the number of pages of a store
    ``TracingContext``      the state of the traced frame: its fake mode and its dynamic dims
    ``compile_lock``        held while a graph is traced outside of Dynamo's own call: tracing is not thread-safe
    ``detect_fake_mode``    the fake mode of Dynamo's example inputs
    ``many_versions``       raises the recompile limits while many graphs of one frame are asked for
    ``lookup_backend``      a backend by name
    ``mark_dynamic``        marks a dim of a new tensor as dynamic, without a guard
    ``TensorifyState``, ``TensorifyScalarRestartAnalysis``  make Dynamo restart with some floats as constants
    ``is_float_symbol``     whether a symbol represents a float
    ``no_dynamo``           makes Dynamo skip a code object's frames and all frames that they call
    ``trace_structured``    writes an artifact into torch's structured trace (``TORCH_TRACE``), which tlparse shows
    ``traced_scopes``       the variables of the compiled frame, by the first letter of sources (L or G)
Tracing
    ``FakeTensor``, ``FakeTensorMode``, ``in_kernel_invocation_manager``    tensors without data
    ``functorch_interpreters``  the active functorch transforms, to find ``vmap`` regions
    ``ProxyTensor``, ``get_proxy_mode``, ``get_proxy_slot``, ``set_proxy_slot``  the nodes of traced values
    ``no_modes``            runs a computation on real values in the middle of a trace
    ``no_proxies``, ``track_values``    run a computation on traced values unrecorded, and assign its result to a node
    ``no_python_dispatcher``, ``python_dispatcher``  shape functions for symbolic sizes, off and on
Values
    ``OpOverload``, ``OpOverloadPacket``, ``HigherOrderOperator``  classes of ATen operators and of Dynamo's regions
    ``ValueRanges``, ``bound_sympy``    ranges of expressions, from ranges of their symbols
    ``CleanDiv``, ``FloorDiv``, ``Max``, ``Min``, ``Mod``, ``PythonMod``   SymPy functions in symbolic sizes
    ``DisableTorchFunction``, ``DisableTorchFunctionSubclass``  access a tensor without its class's overrides
    ``dispatch_keys``       a tensor's dispatch keys, on which Dynamo guards
    ``leave_vmap``          leaves one ``vmap`` level, after a call that failed inside of it
    ``is_wrapper``          whether a value is a wrapper subclass: a sharded or quantized weight
    ``parse_to``            the arguments of ``Tensor.to`` as dtype and device
    ``shares_memory``       whether two tensors share a storage
    ``storage_uses``        references to a storage: a cache tensor is adopted only if it has no others
    ``safe_softmax``        softmax that is zero in fully masked rows, as in flex attention
    ``tree_leaves``, ``tree_map``, ``tree_map_only``  flatten and map nested arguments
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dispatch.python import enable_python_dispatcher as python_dispatcher
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import maybe_mark_dynamic as mark_dynamic
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters as functorch_interpreters
from torch._guards import TracingContext, detect_fake_mode
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import _ProxyTensor as ProxyTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as no_proxies
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.fx.experimental.proxy_tensor import track_tensor_tree as track_values
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

safe_softmax = torch._safe_softmax
dispatch_keys = torch._C._dispatch_keys
leave_vmap = torch._C._functorch._vmap_decrement_nesting
parse_to = torch._C._nn._parse_to
shares_memory = torch._C._is_alias_of  # type: ignore[attr-defined]
storage_uses = torch._C._storage_Use_Count

__all__ = [
    "CleanDiv", "ConstantSource", "DisableTorchFunction", "DisableTorchFunctionSubclass", "FakeTensor", "FakeTensorMode", "FloorDiv",
    "HigherOrderOperator", "Max", "Min", "Mod", "OpOverload", "OpOverloadPacket", "ProxyTensor", "PythonMod",
    "TensorifyScalarRestartAnalysis", "TensorifyState", "TracingContext", "ValueRanges", "bound_sympy", "compile_lock", "detect_fake_mode",
    "dispatch_keys", "functorch_interpreters", "get_proxy_mode", "get_proxy_slot", "in_kernel_invocation_manager", "is_float_symbol",
    "is_wrapper", "leave_vmap", "lookup_backend", "many_versions", "mark_dynamic",
    "no_dynamo", "no_modes", "no_proxies", "no_python_dispatcher", "parse_to", "python_dispatcher", "safe_softmax", "set_proxy_slot",
    "shares_memory", "storage_uses", "trace_structured", "traced_scopes", "track_values", "tree_leaves", "tree_map", "tree_map_only",
]


def is_float_symbol(symbol: Any) -> bool:
    """Return whether a symbol of a shape environment represents a Python float of the caller."""
    return symbol_is_type(symbol, SymT.FLOAT)


def many_versions(most: int) -> AbstractContextManager[None]:
    """Let Dynamo compile up to ``most`` versions of a frame inside of the context; beyond the limit (default 8) it runs frames eagerly."""
    patch: AbstractContextManager[None] = dynamo_config.patch(recompile_limit=most, accumulated_recompile_limit=8 * most)
    return patch


def no_dynamo(code: CodeType) -> None:
    """Keep Dynamo from compiling any frame of ``code``, and any that such a frame calls."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def traced_scopes() -> dict[str, dict[str, Any]] | None:
    """Return the local (L) and global (G) variables of the frame that Dynamo compiles in this thread; None if it compiles none."""
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None
    return {"L": frame.f_locals, "G": frame.f_globals}
