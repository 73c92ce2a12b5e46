"""Module names: the names of all modules of the model that Dynamo is compiling a part of, whether this part runs them or not.

A graph says which modules its nodes came from. Where graphs break there are many graphs, and an entry of a policy may be meant for one
that comes later. So the modules are asked that the frame holds whose graph this is, and those whose calls stand around it.
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
"""What a module's name starts with in Dynamo's words: a local or a global variable of the frame that it compiles."""
WRAPPER = "_orig_mod."
"""What the names of a module start with in the module that ``torch.compile`` makes of it."""


def module_names(gm: fx.GraphModule) -> frozenset[str] | None:
    """Take a graph of Dynamo's while its frame is compiled; return all modules' names, by the paths of sites. None where one is not known.

    A frame that was broken has the names that its sites get there, and those that they have in the modules which call it.
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
    """The variables that hold the modules of a graph, as ``L['self']``; empty where one has another name."""
    stacks = [node.meta[STACK] for node in gm.graph.nodes if node.meta.get(STACK)]
    found = {ROOT.match(next(iter(stack.values()))[0]) for stack in stacks}
    return set() if None in found else {item[0] for item in found if item is not None}


def _value(root: str, scopes: dict[str, dict[str, Any]]) -> Any:
    """The value of a variable; None where there is none."""
    return scopes[root[0]].get(root[3:-2])


def _below(value: Any, name: str) -> set[str]:
    """Return the dotted names of all modules under ``value``: a module itself, or an object that has modules as attributes."""
    if isinstance(value, nn.Module):
        return {_joined(name, inner) for inner, _ in value.named_modules(remove_duplicate=False)}
    return {
        _joined(name, attribute, inner) for attribute, item in getattr(value, "__dict__", {}).items() if isinstance(item, nn.Module)
        for inner, _ in item.named_modules(remove_duplicate=False)
    }


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _calling() -> set[str]:
    """Names of the modules whose calls are on Python's stack, as each of them calls its own."""
    found: set[str] = set()
    frame = sys._getframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            found |= {inner.removeprefix(WRAPPER) for inner in _below(module, "")}
        frame = frame.f_back  # type: ignore[assignment]
    return found
