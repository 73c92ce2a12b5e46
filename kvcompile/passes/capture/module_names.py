"""Module names: names of all modules of the model that is being compiled, including modules that this graph does not run.

A graph only names the modules of its own nodes. After a graph break there are several graphs, and a policy entry may name a module of
a later one. So the names are read from the modules that the compiled frame holds, and from modules whose calls are on Python's stack.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import fx, nn

from kvcompile.passes.capture.nested import STACK
from kvcompile.passes.graph.dynamo import traced_scopes
from kvcompile.passes.graph.shapes import clean_path

ROOT = re.compile(r"[LG]\['\w+'\]")
"""Start of a module's name in Dynamo's notation: a local or global variable of the frame that it compiles."""
WRAPPER = "_orig_mod."
"""Prefix of module names inside of the module that ``torch.compile`` returns."""


def module_names(gm: fx.GraphModule) -> frozenset[str] | None:
    """Return the paths of all modules of the model that ``gm`` is traced from, as reports spell them; None if a module cannot be found.

    Works only while Dynamo compiles ``gm``, since it reads the traced frame's variables.
    """
    scopes, roots = traced_scopes(), _roots(gm)
    if scopes is None or not roots:
        return None
    found = _calling()
    for root in roots:
        names = _below(_value(root, scopes), clean_path(root))
        if not names:
            return None
        found |= names
    return frozenset(found)


def _roots(gm: fx.GraphModule) -> set[str]:
    """Return the variables that hold the graph's modules, such as ``L['self']``; empty if one has a name of another form."""
    stacks = [node.meta[STACK] for node in gm.graph.nodes if node.meta.get(STACK)]
    found = {ROOT.match(next(iter(stack.values()))[0]) for stack in stacks}
    return set() if None in found else {item[0] for item in found if item is not None}


def _value(root: str, scopes: dict[str, dict[str, Any]]) -> Any:
    """Return the value of a local or global variable; None if it does not exist."""
    return scopes[root[0]].get(root[3:-2])


def _below(value: Any, name: str) -> set[str]:
    """Return the dotted names of all modules under ``value``, a module or an object with modules as attributes."""
    if isinstance(value, nn.Module):
        return {_joined(name, inner) for inner, _ in value.named_modules(remove_duplicate=False)}
    return {
        _joined(name, attribute, inner) for attribute, item in getattr(value, "__dict__", {}).items() if isinstance(item, nn.Module)
        for inner, _ in item.named_modules(remove_duplicate=False)
    }


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _calling() -> set[str]:
    """Return the names of submodules of all modules with a call on Python's stack, relative to each of these."""
    found: set[str] = set()
    frame = sys._getframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            found |= {inner.removeprefix(WRAPPER) for inner in _below(module, "")}
        frame = frame.f_back  # type: ignore[assignment]
    return found
