"""CPU programs: a cut program on the CPU in float64 or float32, with fake values to match.

A rewrite is compared in a wide dtype, where differences come from its meaning and not from rounding. The dtypes of queries, new tokens,
caches and results become the wide one, and so does every dtype with finer steps. A cast to a dtype of coarser steps (float8, an int,
bfloat16 in a float32 model), or of smaller range (float16 in a bfloat16 model), is part of the meaning and stays. The lowest number of a
dtype, with which models mask, becomes that of the wide dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph import shapes
from kvcompile.passes.graph.casts import no_coarser
from kvcompile.passes.graph.dynamo import python_dispatcher
from kvcompile.passes.graph.effects import analyse
from kvcompile.passes.graph.shapes import is_tensor, op_name, value_of
from kvcompile.types import NUMBERS
from kvcompile.validation.subgraph import NotApart, Number, Subgraph, same

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
EMPTY = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default, torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
}
"""Operators that make uninitialised tensors, each with one that makes zeros instead: a store has zeros where nothing was written."""


def _lifted(part: Subgraph) -> set[torch.dtype]:
    """Return the dtypes that become the wide one.

    They are the dtypes of queries, new tokens, caches and results, and every dtype of finer steps and wider range.
    """
    nodes = {node for site in part.sites for node in (site.attention.q, site.attention.output)}
    nodes |= {node for site in part.sites for slot in site.slots for node in (slot.root, slot.write.values)}
    found = [value_of(node).dtype for node in nodes if isinstance(value_of(node), torch.Tensor)]
    own = {dtype for dtype in found if dtype in FLOATS}
    return own | {dtype for dtype in FLOATS if any(no_coarser(dtype, other) for other in own)}


def _wide(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a constant cast to ``dtype``; plus and minus the largest number of its old float dtype become those of ``dtype``."""
    if held.dtype == dtype or not held.dtype.is_floating_point:
        return held.to(dtype)
    ends = held.abs() == torch.finfo(held.dtype).max
    return torch.where(ends, held.to(dtype).sign() * torch.finfo(dtype).max, held.to(dtype))


@contextlib.contextmanager
def unguarded(mode: Any) -> Iterator[None]:
    """Suppress guards: tracing inside adds none to the caller's graph."""
    with mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext():
        yield


def _narrowed(held: torch.Tensor, number: Number) -> torch.Tensor:
    """Return a view of a constant with every dim cut from size n to ``number(n)``, from its start."""
    for dim, size in enumerate(held.shape):
        held = held.narrow(dim, 0, number(size))
    return held


class _Propagate(fx.Interpreter):
    """An interpreter that runs a program over fake tensors in a wide dtype, and stores the value of each node in its ``meta``.

    ``narrow``: (node, value) for nodes whose result still has a dtype that should have become the wide one. In the arguments of other
    nodes, the largest number of their dtype is replaced by that of the wide dtype.
    """

    def __init__(self, module: fx.GraphModule, lifted: set[torch.dtype], dtype: torch.dtype) -> None:
        super().__init__(module)
        self.lifted, self.dtype = lifted - {dtype}, dtype
        self.narrow: list[tuple[fx.Node, torch.Tensor]] = []
        self.ends = {node: _end(node) for node in module.graph.nodes if node.op == "call_function"}

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of one node, in the wide dtype."""
        # Keep a float that is taken out of an argument: a new fake tensor would give another symbol for it.
        given = value_of(n) if op_name(n) in NUMBERS and isinstance(value_of(n), torch.SymFloat) else None
        value = super().run_node(n) if given is None else given
        if n.op == "call_function" and isinstance(value, torch.Tensor) and value.dtype in self.lifted:
            self.narrow.append((n, value))
            value = value.to(self.dtype)
        elif (end := self.ends.get(n)) is not None:
            n.args, n.kwargs = fx.node.map_aggregate((n.args, n.kwargs), lambda item: self._moved(item, end))
        if n.op != "output":
            n.meta["val"] = value
        return value

    def _moved(self, item: Any, end: float) -> Any:
        at_end = type(item) is float and abs(item) == end
        return math.copysign(torch.finfo(self.dtype).max, item) if at_end else item


def _end(node: fx.Node) -> float | None:
    """Return the largest number of the dtype in which a node computes; None for a dtype that is not floating point."""
    values = [value_of(item) for item in (node, *node.all_input_nodes) if is_tensor(item)]
    # A comparison computes in the dtype of its operands, not of its result.
    dtype = next((value.dtype for value in values if value.dtype is not torch.bool), None)
    return torch.finfo(dtype).max if dtype is not None and dtype in FLOATS else None


def _widen(graph: fx.Graph, node: fx.Node, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast the result of a node that computes in torch's default dtype to ``dtype``, in place.

    A new node computes it, and the old one becomes the cast.
    """
    with graph.inserting_before(node):
        made = graph.call_function(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]
    made.meta["val"] = value
    node.target, node.args, node.kwargs = torch.ops.aten.to.dtype, (made, dtype), {}


def plain(part: Subgraph, dtype: torch.dtype, number: Number = same) -> Subgraph:
    """Return the program on the CPU in ``dtype``, with every int mapped by ``number``; changes the program's nodes in place.

    Raises NotApart if the program does not run in this form.
    """
    lifted = _lifted(part)

    def changed(item: Any) -> Any:
        if isinstance(item, torch.dtype):
            return dtype if item in lifted else item
        if isinstance(item, torch.device):
            return CPU
        if isinstance(item, (list, tuple)):
            return type(item)(changed(entry) for entry in item)
        # A symbol that guards fixed is a number.
        item = shapes.plain(item)
        return number(item) if type(item) is int else item

    captured, mode = part.captured, part.captured.fake_mode
    module, graph = captured.module, captured.graph
    for node in graph.nodes:
        if node.op == "get_attr":
            held = getattr(module, str(node.target))
            if isinstance(held, torch.Tensor):
                # The captured module shares this constant, so the cut program gets one of its own.
                setattr(module, str(node.target), _wide(_narrowed(held.detach(), number).to(CPU), changed(held.dtype)))
        elif node.op == "call_function":
            node.args = tuple(changed(item) for item in node.args)
            node.kwargs = {name: changed(item) for name, item in node.kwargs.items()}
            if node.target in EMPTY:
                node.kwargs = {name: item for name, item in node.kwargs.items() if name != "memory_format"}
                node.target = EMPTY[node.target]
    module.recompile()
    # Some operators are symbolic only under the dispatcher that the graph was traced with.
    with unguarded(mode), python_dispatcher(), mode, torch.no_grad():
        fakes = tuple(
            torch.empty([changed(size) for size in fake.shape], dtype=changed(fake.dtype), device=CPU) if isinstance(fake, torch.Tensor)
            else changed(fake) if isinstance(fake, torch.SymInt) else fake
            for fake in captured.fakes
        )
        try:
            run = _Propagate(module, lifted, dtype)
            run.run(*fakes, enable_io_processing=False)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise NotApart(f"it does not run on small tensors of {dtype} ({type(error).__name__}: {first})") from error
    for node, value in run.narrow:
        _widen(graph, node, value, dtype)
    module.recompile()
    apart = dataclasses.replace(captured, fakes=fakes)
    return dataclasses.replace(part, captured=apart, effects=analyse(graph))
