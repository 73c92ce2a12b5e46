"""Graph cache: keys under which a compiled graph is reused, when a cache that changes its class makes Dynamo capture the graph again.

When a dense cache is adopted, Dynamo captures the next call again (its class and strides changed), and gets an equal
graph. ``call_key`` is the key of Dynamo's graph, before any of our passes; ``fingerprint`` is the key of a rewritten graph, which
different captures can lead to. Inductor's own cache would still retrace and reload both. Only graphs without the caller's own
symbolic sizes and floats are reused: their guards are in Dynamo, not in the graph, and code compiled for one float may
contain it as a constant. Parameters count by identity, so that two models never share one recorded CUDA graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.host.torch_api import DisableTorchFunctionSubclass, FakeTensor, is_wrapper
from kvcompile.lowering.ops import operations as ops  # noqa: F401 - defines the operation named next
from kvcompile.types import NUMBERS

EXPOSE = torch.ops.kvcompile.expose


def _describe(value: Any, pages: Mapping[Any, str]) -> str | None:
    """Return an input's metadata as text; None if it has symbols other than numbers of pages."""
    if isinstance(value, torch.SymInt):
        return None
    if not isinstance(value, torch.Tensor):
        return repr(value)
    texts = []
    for size in (*value.shape, *value.stride()):
        if isinstance(size, int):
            texts.append(str(size))
        elif len(own := size.node.expr.free_symbols) == 1 and own <= set(pages):
            texts.append(pages[next(iter(own))])
        else:
            return None
    return f"{value.dtype}{value.device}[{','.join(texts)}]{_parts(value)}"


def call_key(gm: fx.GraphModule, examples: Sequence[Any], is_handle: Callable[[object], bool], key: str) -> str | None:
    """Return a key of Dynamo's graph and its arguments; a compressed cache counts as dense. None if the graph may not be reused."""
    digest = hashlib.sha256(key.encode())
    names: dict[fx.Node, str] = {}
    count = 0
    for node in gm.graph.nodes:
        if node.op in {"get_attr", "call_module"} or not NUMBERS.isdisjoint(str(node.target).split(".")):
            return None
        if node.target in {EXPOSE, EXPOSE.default}:
            names[node] = names[node.args[0]]
            continue
        names[node] = f"n{count}"
        count += 1
        target = "" if node.op in {"placeholder", "output"} else str(node.target)
        spelled = fx.node.map_arg((node.args, node.kwargs), lambda item: names[item])
        digest.update(f"{node.op} {target} {spelled!r}\n".encode())
    with DisableTorchFunctionSubclass():
        for value in examples:
            if isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in value.shape)):
                return None
            if not isinstance(value, torch.Tensor):
                digest.update(repr(value).encode())
                continue
            stride = torch.empty(value.shape, device="meta").stride() if is_handle(value) else value.stride()
            digest.update(f"{value.dtype}{value.device}{tuple(value.shape)}{stride}{_identity(value)}{_parts(value)}\n".encode())
    return digest.hexdigest()


def _parts(value: torch.Tensor) -> str:
    """Return a text for the inner tensors and context of a wrapper tensor (sharded, quantized); empty for a plain tensor."""
    if not is_wrapper(value):
        return ""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    # A part need not be a tensor: DTensor has a device mesh.
    parts = [getattr(value, name) for name in names]
    inner = [
        (part.dtype, tuple(part.shape), part.stride(), _parts(part)) if isinstance(part, torch.Tensor) else repr(part) for part in parts
    ]
    return f"{type(value).__qualname__}{context!r}{inner}"


def _identity(value: torch.Tensor) -> str:
    return str(id(value)) if isinstance(value, torch.nn.Parameter) else ""


def identities(examples: Sequence[Any]) -> str:
    """Return the identities of the parameters among the arguments, as text."""
    return ",".join(_identity(value) for value in examples if isinstance(value, torch.Tensor))


def fingerprint(module: fx.GraphModule, fakes: Sequence[Any], pages: Mapping[Any, str], key: str) -> str | None:
    """Return a key under which a compiled rewritten graph may be reused; None if it may not."""
    digest = hashlib.sha256(key.encode())
    names: dict[fx.Node, str] = {}
    for index, node in enumerate(module.graph.nodes):
        names[node] = f"n{index}"
        if not NUMBERS.isdisjoint(str(node.target).split(".")):
            return None
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.numel() > 4096:
                return None
            digest.update(f"const {value.dtype} {value.cpu().tolist()}".encode())
            continue
        target = "" if node.op in {"placeholder", "output"} else str(node.target)
        spelled = fx.node.map_arg((node.args, node.kwargs), lambda item: names[item]) if node.op != "placeholder" else ()
        digest.update(f"{node.op} {target} {spelled!r}\n".encode())
    for value, node in zip(fakes, module.graph.find_nodes(op="placeholder"), strict=True):
        text = _describe(value, pages)
        if text is None:
            return None
        static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        digest.update(f"{text} {static}\n".encode())
    return digest.hexdigest()
