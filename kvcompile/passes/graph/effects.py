"""Effects: who aliases a tensor, who writes it, who reads it. The captured graph is not functional, so order counts.

Aliasing is read from the operators' schemas, never from names: an output annotated with the alias set of
an input is a view of it (or may be), an argument annotated as written is a write.
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
    """The tensors that a node writes to in place."""
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
    """The tensor that ``node`` is a view of, or a copy that stands for the same elements."""
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
    """Whether an operator's schema lets its result lie in the memory of its first argument."""
    schema = _schema(node)
    if schema is None or not schema.returns or not schema.arguments:
        return False
    out, into = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return out is not None and into is not None and bool(out.before_set & into.before_set)


def _parts(value: object) -> list[torch.Tensor]:
    """The plain tensors that a value holds: itself, or what it is made of."""
    if not is_wrapper(value):
        return [value] if isinstance(value, torch.Tensor) else []
    names = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [part for name in names for part in _parts(getattr(value, name))]


def _share_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether the tensors of two nodes, or any that they are made of, have one storage."""
    return any(shares_memory(one, other) for one in _parts(value_of(a)) for other in _parts(value_of(b)))


def same_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes' fake tensors share storage: a true view rather than a copy."""
    return bool(shares_memory(a.meta["val"], b.meta["val"]))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Effects:
    """Order, roots, and the writes on every root."""

    order: dict[fx.Node, int]
    root: dict[fx.Node, fx.Node]
    writes: dict[fx.Node, tuple[fx.Node, ...]]
    output: fx.Node

    def family(self, root: fx.Node) -> set[fx.Node]:
        """All nodes that stand for elements of ``root``: views, copies of views, results of in-place writes."""
        return {node for node, owner in self.root.items() if owner is root}

    def readers(self, root: fx.Node) -> set[fx.Node]:
        """The nodes that consume elements of ``root`` and are no views of it; the output node among them."""
        family = self.family(root)
        found = set()
        for node in family:
            for user in node.users:
                if user in family or op_name(user) in SPLITS | SIZES:
                    continue
                found.add(user)
        return found

    def writes_to(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The writes to the memory of ``node``, in order."""
        return self.writes.get(self.root.get(node, node), ())

    def writes_between(self, node: fx.Node, after: fx.Node, before: fx.Node) -> tuple[fx.Node, ...]:
        """The writes to the memory of ``node`` that stand behind ``after`` and ahead of ``before``."""
        first, last = self.order[after], self.order[before]
        return tuple(write for write in self.writes_to(node) if first < self.order[write] < last)

    def writes_after(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The writes to the memory of ``node`` that stand behind it: what it gives is something else from then on."""
        return tuple(write for write in self.writes_to(node) if self.order[write] > self.order[node])

    def outputs_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The output positions at which one of ``nodes`` is returned."""
        wanted = set(nodes)
        returned = self.output.args[0]
        listed = returned if isinstance(returned, (list, tuple)) else [returned]
        return tuple(index for index, item in enumerate(listed) if isinstance(item, fx.Node) and item in wanted)


def analyse(graph: fx.Graph) -> Effects:
    """Read the effects of a captured graph, once, in order."""
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
