"""Private names of torch outside of Inductor that the lowering uses, each imported only here. All exist in torch 2.11, 2.12 and 2.13.

    ``lookup_backend``        the backend "aot_eager" by its name, as ``torch.compile`` takes it
    ``BackendCompilerFailed``, ``TorchDynamoException``  distinguish a compiler's own error from one that makes Dynamo start again
    ``TracingContext``, ``tracing``  compile a graph within Dynamo's context, or a new one if Dynamo has none
    ``ConstantSource``        names an attribute of a graph for AOTAutograd, which then adds no guard for it
    ``DisableTorchFunctionSubclass``  inspects tensors of any class without calling their overrides
    ``OpOverload``            the type of ``torch.ops.namespace.name.default``
    ``FakeTensor``, ``FakeTensorMode``  values of a graph's nodes before it runs
    ``OrderedSet``            the type of sets that Inductor's nodes return
    ``is_wrapper``            whether a tensor is composed of other tensors: a sharded or a quantized weight
    ``TorchDispatchMode``     sees every operator that a function calls, to find any that is no kernel of ours
    ``tree_map``              maps over nested lists and dictionaries of operands
"""

from __future__ import annotations

from torch._C import DisableTorchFunctionSubclass
from torch._dynamo import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_map

__all__ = [
    "BackendCompilerFailed", "ConstantSource", "DisableTorchFunctionSubclass", "FakeTensor", "FakeTensorMode", "OpOverload", "OrderedSet",
    "TorchDispatchMode", "TorchDynamoException", "TracingContext", "is_wrapper", "lookup_backend", "tracing", "tree_map",
]
