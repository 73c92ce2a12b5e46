"""Fingerprint: the key under which the verdict on a program is kept, for equal programs of other layers, models and processes."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.graph.worlds import Guards
from kvcompile.passes.match.sites import Attention, Site
from kvcompile.validation.subgraph import Outline

SYMBOL = re.compile(r"\b[su]\d+\b")
"""Pattern of the names of symbolic sizes."""


MANY = 1 << 12
"""The most elements of a constant whose values identify it in a fingerprint; a larger one is identified by its name."""


def fingerprint(whole: Outline) -> str:
    """Return a key of a program and of the matcher's records of it; equal for programs that differ only in names."""
    lines: list[str] = []
    names: dict[fx.Node, str] = defaultdict(lambda: "?")
    module = whole.captured.module
    for index, node in enumerate((*whole.begins, *whole.inside)):
        names[node] = f"n{index}"
        begins = index < len(whole.begins)
        target = "" if begins or node.op in {"placeholder", "get_attr"} else str(node.target)
        operands = () if begins else fx.node.map_arg((node.args, node.kwargs), lambda item: names[item])
        held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        constant = _content(held, str(node.target)) if isinstance(held, torch.Tensor) else ""
        lines.append(f"{target} {operands!r} {_described(value_of(node))} {constant}")
    places = {index: position for position, index in enumerate(whole.caches)}
    lines += [repr(_spelled(site, names, places)) for site in whole.sites]
    # Every layer's caches have symbols of their own, so symbols are numbered in order of appearance.
    symbols: dict[str, str] = {}

    def renamed(text: str) -> str:
        return SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"size{len(symbols)}"), text)

    text = renamed("\n".join(lines))
    # The guards on sizes decide which calls are compared: a verdict for start = 0 says nothing of other starts.
    asked = sorted(renamed(guard) for guard in _guards(whole, set(symbols)))
    return hashlib.sha256("\n".join((text, *asked)).encode()).hexdigest()


def _guards(whole: Outline, names: set[str]) -> Iterator[str]:
    """Yield lines of text: the value range of each symbol in ``names``, then each guard over these symbols only."""
    env = whole.captured.fake_mode.shape_env
    if env is None:
        return
    yield from (f"{symbol} in {bounds}" for symbol, bounds in env.var_to_range.items() if str(symbol) in names)
    for guard, found in Guards(env).asked:
        if {str(symbol) for symbol in found} <= names:
            yield str(guard)


def _content(held: torch.Tensor, name: str) -> str:
    """Return a constant's values as text, or ``name`` if it has more than ``MANY`` elements."""
    return str(held.tolist()) if held.numel() <= MANY else name


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(map(str, value.shape))}"
    return str(value) if isinstance(value, (torch.SymInt, int)) else ""


def _spelled(value: Any, names: dict[fx.Node, str], places: dict[int, int]) -> Any:
    """Return a record of the matcher as nested text, without the names of nodes, modules and source lines."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return [_spelled(item, names, places) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_spelled(item, names, places)) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    left = {"index", "path", "line"} if isinstance(value, Site) else {"others"} if isinstance(value, Attention) else set()
    found = [type(value).__name__]
    for item in dataclasses.fields(value):
        held = getattr(value, item.name)
        if item.name == "outputs":
            held = tuple(places[index] for index in held)
        if item.name not in left:
            found.append(_spelled(held, names, places))
    return found
