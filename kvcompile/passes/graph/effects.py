"""Effects: aliases, writers and readers of every tensor in a captured graph, which is not functional, so order matters.

Aliasing is read from operators' schemas, never from names: an output annotated with the alias set of an input is (or may be) a view of
it, and an argument annotated as written is a write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import OpOverload, is_wrapper, shares_memory
from kvcompile.passes.graph.operators import COPIES, SIZES, SPLITS
from kvcompile.passes.graph.pullback import PULLBACKS
from kvcompile.passes.graph.shapes import AS_WRITTEN, is_tensor, op_name, value_of


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    target = node.target
    return target._schema if isinstance(target, OpOverload) else None


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes of the tensors that a node writes to in place; () for a pure call."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return ()
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if is_tensor(item)]
    if op_name(node) == "detach_":
        return ()
    return tuple(found)


def view_parent(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``node`` is a view or a copy of (casts included); None if it holds new values."""
    if AS_WRITTEN in node.meta:
        return next((item for item in node.all_input_nodes if _share_memory(item, node)), None)
    if node.op != "call_function" or not node.args:
        return None
    name = op_name(node)
    first = node.args[0]
    if name == "getitem":
        if isinstance(first, fx.Node) and op_name(first) in SPLITS:
            return first.args[0] if is_tensor(first.args[0]) else None
        return None
    if not is_tensor(first):
        return None
    if name in PULLBACKS or name in COPIES:
        return first
    return first if gives_view(node) else None


def gives_view(node: fx.Node) -> bool:
    """Return whether an operator's schema allows its result to be a view of its first argument."""
    schema = _schema(node)
    if schema is None or not schema.returns or not schema.arguments:
        return False
    out, into = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return out is not None and into is not None and bool(out.before_set & into.before_set)


def _parts(value: object) -> list[torch.Tensor]:
    """Return the plain tensors inside of a value: itself, or the parts of a wrapper subclass; [] for anything else."""
    if not is_wrapper(value):
        return [value] if isinstance(value, torch.Tensor) else []
    names = value.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(value, name))]


def _share_memory(a: fx.Node, b: fx.Node) -> bool:
    """Return whether tensors of two nodes, or any of their wrapped parts, share a storage."""
    return any(shares_memory(one, other) for one in _parts(value_of(a)) for other in _parts(value_of(b)))


def same_memory(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes' fake tensors share a storage: a true view rather than a copy."""
    return bool(shares_memory(a.meta["val"], b.meta["val"]))


@dataclass(frozen=True)
class Effects:
    """Effects of a graph: each node's index (``order``), the root of each view, the writes to each root in order, and the output node."""

    order: dict[fx.Node, int]
    root: dict[fx.Node, fx.Node]
    writes: dict[fx.Node, tuple[fx.Node, ...]]
    output: fx.Node

    def family(self, root: fx.Node) -> set[fx.Node]:
        """Return all nodes with elements of ``root``: itself, views, copies of views, results of in-place writes."""
        return {node for node, owner in self.root.items() if owner is root}

    def readers(self, root: fx.Node) -> set[fx.Node]:
        """Return the nodes that read elements of ``root``, except its ``family``, splits and reads of sizes; includes the output."""
        family = self.family(root)
        found = set()
        for node in family:
            for user in node.users:
                if user in family or op_name(user) in SPLITS | SIZES:
                    continue
                found.add(user)
        return found

    def writes_to(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the writes to the memory of ``node``, in order."""
        return self.writes.get(self.root.get(node, node), ())

    def writes_between(self, node: fx.Node, after: fx.Node, before: fx.Node) -> tuple[fx.Node, ...]:
        """Return the writes to the memory of ``node`` after the node ``after`` and before the node ``before``, in order."""
        first, last = self.order[after], self.order[before]
        return tuple(write for write in self.writes_to(node) if first < self.order[write] < last)

    def writes_after(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the writes to the memory of ``node`` that come after it and change its value."""
        return tuple(write for write in self.writes_to(node) if self.order[write] > self.order[node])

    def outputs_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """Return the indices of the graph's outputs that are one of ``nodes``."""
        wanted = set(nodes)
        returned = self.output.args[0]
        listed = returned if isinstance(returned, (list, tuple)) else [returned]
        return tuple(index for index, item in enumerate(listed) if isinstance(item, fx.Node) and item in wanted)


def analyse(graph: fx.Graph) -> Effects:
    """Return the effects of a captured graph."""
    order: dict[fx.Node, int] = {}
    root: dict[fx.Node, fx.Node] = {}
    writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    output = None
    for index, node in enumerate(graph.nodes):
        order[node] = index
        if node.op == "output":
            output = node
        if is_tensor(node):
            parent = view_parent(node)
            root[node] = root[parent] if parent is not None and parent in root else node
        for target in written_arguments(node):
            writes[root.get(target, target)].append(node)
    assert output is not None
    return Effects(order, root, {key: tuple(value) for key, value in writes.items()}, output)
