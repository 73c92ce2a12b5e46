"""Private names of torch outside of Inductor that the lowering uses, each once. All were seen in torch 2.11, 2.12 and 2.13.

    ``lookup_backend``        the backend "aot_eager" by its name, as ``torch.compile`` takes it
    ``BackendCompilerFailed``, ``TorchDynamoException``  tell a compiler's own error from those that make Dynamo begin again
    ``TracingContext``, ``tracing``  compile a graph within Dynamo's context, or within one of its own where Dynamo has none
    ``ConstantSource``        names an attribute of a graph for AOTAutograd, which guards nothing then
    ``DisableTorchFunctionSubclass``  looks at tensors of any class without calling what their class overrides
    ``OpOverload``            the type of ``torch.ops.namespace.name.default``
    ``FakeTensor``, ``FakeTensorMode``  values of a graph's nodes before there are any
    ``OrderedSet``            the type of sets that Inductor's nodes return
    ``is_wrapper``            whether a value is a tensor that is made of others: a sharded or a quantized weight
    ``TorchDispatchMode``     sees every operator that a function calls, to find what is no kernel of ours
    ``tree_map``              over nested lists and dictionaries of operands
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
