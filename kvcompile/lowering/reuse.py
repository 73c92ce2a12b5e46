"""Reuse: a graph that was compiled once is not compiled again because a cache changed its face.

When a dense cache is adopted, Dynamo captures the next call anew (its class and strides changed), and
the rewritten graph is the very same one. Inductor's own cache would still retrace and reload it; here
the compiled callable is kept, keyed by the graph's text, its inputs' metadata and its constants. Only
graphs without the caller's own symbolic sizes are reused: their guards live in Dynamo, not in the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def _describe(value: Any, pages: Any) -> str | None:
    """An input's metadata as text; None where it has symbols other than the number of pages."""
    if isinstance(value, torch.SymInt):
        return None
    if not isinstance(value, torch.Tensor):
        return repr(value)
    texts = []
    for size in (*value.shape, *value.stride()):
        if isinstance(size, int):
            texts.append(str(size))
        elif size.node.expr.free_symbols == {pages}:
            texts.append("N")
        else:
            return None
    return f"{value.dtype}{value.device}[{','.join(texts)}]"


def fingerprint(module: fx.GraphModule, fakes: Sequence[Any], pages: Any, key: str) -> str | None:
    """A key under which a compiled graph may be reused; None where it may not."""
    digest = hashlib.sha256(key.encode())
    names: dict[fx.Node, str] = {}
    for index, node in enumerate(module.graph.nodes):
        names[node] = f"n{index}"
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor) or value.numel() > 4096:
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
