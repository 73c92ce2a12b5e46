"""Layer regions: equal layers of a graph become calls of one region, which AOTAutograd and Inductor then compile once.

before:  ... norm, linear, append, attend, linear, ... norm, linear, append, attend, linear, ...
after:   ... invoke_subgraph(layer, x, weights, planes) -> invoke_subgraph(layer, x, weights, planes) -> ...

Layers are found by their operations, not by their names: a run of nodes with an attention of ours that is followed by equal runs, node
for node, with outside operands of the same kind. Nothing is folded if operands share memory that a layer writes, or if a layer
returns a view of one of its operands.

AOTAutograd cannot functionalise an operation of ours that writes inside of a region: such operations stay between the regions, and each
region extends from one layer's write to the next layer's:

after:   ... norm, linear, append -> invoke_subgraph(attend, linear, norm, linear) -> append -> invoke_subgraph(...) -> append ...
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kvcompile.lowering.host.torch_api import OpOverload

LEAST_LAYERS = 2
"""Fewest layers that are folded."""
MOST_CANDIDATES = 8
"""Most candidate repetitions that are compared node for node."""


@dataclass(frozen=True)
class RepeatedLayers:
    """Equal layers in a graph: ``count`` runs of ``length`` consecutive nodes, one a layer, the first at index ``start``.

    Each run begins ``stride`` nodes after the one before.
    """

    start: int
    length: int
    count: int
    stride: int

    @property
    def saved(self) -> int:
        """Number of nodes that folding saves from compilation."""
        return self.length * (self.count - 1)


@dataclass(frozen=True)
class LayerText:
    """One layer's nodes as text that is equal for equal layers, and the operands that they take from outside, in order of first use."""

    text: tuple[str, ...]
    operands: tuple[fx.Node, ...]


def fold_into_regions(module: fx.GraphModule, fakes: Sequence[Any], writers: Container[Any] = ()) -> int:
    """Fold the longest sequence of equal layers of a graph in place; return the number of folded layers, 0 if none are equal.

    ``fakes``: the fake arguments of the graph. ``writers``: functions of this package that trace to operations with mutated operands.
    """
    for node, fake in zip(module.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta.setdefault("val", fake)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    for node in nodes:
        if getattr(node.target, "__module__", "") == "_operator" and "val" not in node.meta:
            _compute(node)
    kinds = [_kind(node) for node in nodes]
    found = []
    for repeated in sorted(_repetitions(nodes, kinds), key=lambda known: (-known.saved, known.start))[: 4 * MOST_CANDIDATES]:
        starts = [(_left(nodes, moved), moved.start) for moved in _moved(kinds, repeated)]
        fewest = [start for left, start in starts if left == min(starts)[0]]
        # The first run may have other operands than the rest.
        found += [(-repeated.saved, min(starts)[0], start, repeated) for start in {*fewest[:1], *fewest[-1:]}]
    for _, _, start, repeated in sorted(found, key=lambda known: known[:3])[:MOST_CANDIDATES]:
        moved = _between_writers(nodes, replace(repeated, start=start), writers)
        outputs = _outputs(nodes, moved)
        if moved.count >= LEAST_LAYERS and outputs and (layers := _layers(nodes, moved)) and _apart(nodes, moved, layers, outputs):
            _replace(module, nodes, moved, layers, outputs)
            return moved.count
    return 0


def _compute(node: fx.Node) -> None:
    """Store the value of a node of size arithmetic in its meta; nodes that a rewrite added have none."""
    args = fx.node.map_arg(node.args, lambda item: item.meta.get("val"))
    if all(isinstance(item, (int, torch.SymInt)) for item in args) and callable(node.target):
        node.meta["val"] = node.target(*args)


# --- finding ----------------------------------------------------------------------------------------------


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(map(str, value.shape))} {tuple(map(str, value.stride()))} {value.device}"
    return str(value) if isinstance(value, (torch.SymInt, int)) else ""


def _kind(node: fx.Node) -> str:
    """Return a node's operation and result form as text, without its operands."""
    value = node.meta.get("val")
    return f"{node.target} {_described(value) if isinstance(value, torch.Tensor) else ''}"


def _ours(node: fx.Node) -> bool:
    """Return whether a node is an operation or function of this package."""
    target = node.target
    return target.namespace == "kvcompile" if isinstance(target, OpOverload) else (
        str(getattr(target, "__module__", "")).startswith("kvcompile.")
    )


def _repetitions(nodes: Sequence[fx.Node], kinds: Sequence[str]) -> Iterator[RepeatedLayers]:
    """Yield candidate repetitions: equal operations of kvcompile at equal distances."""
    places: dict[str, list[int]] = defaultdict(list)
    for at, node in enumerate(nodes):
        if _ours(node):
            places[kinds[at]].append(at)
    found: set[tuple[int, int, int]] = set()
    for where in places.values():
        for step in range(1, min(len(where), MOST_CANDIDATES)):
            for first in range(step):
                found.update(_runs(where[first::step]))
    for first, length, count in found:
        yield RepeatedLayers(first, length, count, length)


def _runs(where: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (value of the first entry, distance, count) for each maximal sequence of equidistant entries of the ascending ``where``.

    Each sequence is also yielded without its first, its last, or both entries, since the nodes around those may differ. None has fewer than
    ``LEAST_LAYERS`` entries; neighbouring sequences share an entry.
    """
    begin = 0
    for at in range(1, len(where)):
        last = at == len(where) - 1
        if last or where[at + 1] - where[at] != where[at] - where[at - 1]:
            # The nodes around the first and the last may differ.
            for first, end in ((begin, at), (begin + 1, at), (begin, at - 1), (begin + 1, at - 1)):
                if end - first + 1 >= LEAST_LAYERS:
                    yield where[first], where[at] - where[at - 1], end - first + 1
            begin = at


def _moved(kinds: Sequence[str], repeated: RepeatedLayers) -> Iterator[RepeatedLayers]:
    """Yield ``repeated`` with its start at the same or an earlier index, for every start at which all layers have equal node kinds."""
    def alike(offset: int) -> bool:
        at = [repeated.start + number * repeated.length + offset for number in range(repeated.count)]
        return at[0] >= 0 and at[-1] < len(kinds) and all(kinds[place] == kinds[at[0]] for place in at)

    behind = 0
    while behind < repeated.length and alike(behind):
        behind += 1
    for before in range(repeated.length):
        if before and not alike(-before):
            return
        if behind + before >= repeated.length:
            yield replace(repeated, start=repeated.start - before)


def _between_writers(nodes: Sequence[fx.Node], repeated: RepeatedLayers, writers: Container[Any]) -> RepeatedLayers:
    """Return the longest part of a layer, or of two consecutive ones, without an operation of kvcompile that writes."""
    def writes(node: fx.Node) -> bool:
        return node.target._schema.is_mutable and _ours(node) if isinstance(node.target, OpOverload) else node.target in writers

    places = [at for at, node in enumerate(_members(nodes, repeated, 0)) if writes(node)]
    if not places:
        return repeated
    # Gaps from one writer to the next; the last gap extends into the following run, which the last run does not have.
    gaps = [(behind - at - 1, at + 1) for at, behind in itertools.pairwise([*places, places[0] + repeated.stride])]
    length, start = max(gaps)
    count = repeated.count - (start > places[-1])
    found = RepeatedLayers(repeated.start + start, length, count, repeated.stride)
    # A view of the region's operands that only prepares the write stays with the writer.
    members = _members(nodes, found, 0)
    while length and _is_view_or_unknown(members[length - 1]):
        length -= 1
    return replace(found, length=length)


def _members(nodes: Sequence[fx.Node], repeated: RepeatedLayers, number: int) -> Sequence[fx.Node]:
    begin = repeated.start + number * repeated.stride
    return nodes[begin : begin + repeated.length]


def _left(nodes: Sequence[fx.Node], repeated: RepeatedLayers) -> int:
    """Return how many results of the second layer's nodes are used outside of that layer."""
    members = _members(nodes, repeated, 1)
    inside = set(members)
    return sum(any(user not in inside for user in node.users) for node in members)


def _outputs(nodes: Sequence[fx.Node], repeated: RepeatedLayers) -> list[int]:
    """Return the indices within a layer of the nodes that its region must return, ascending: in some layer they have users outside of it.

    Nodes whose result is one of the layer's operands are left out.
    """
    found = set()
    for number in range(repeated.count):
        members = _members(nodes, repeated, number)
        inside, same = set(members), _operands_given_back(members)
        found |= {at for at, node in enumerate(members) if node not in same and any(user not in inside for user in node.users)}
    return sorted(found)


def _operands_given_back(members: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the nodes whose result is a whole operand, mutated or unchanged, each with that operand."""
    inside = set(members)
    operands = {_whole(node): node for member in members for node in member.all_input_nodes if node not in inside}
    return {node: operands[_whole(node)] for node in members if isinstance(node.meta.get("val"), torch.Tensor) and _whole(node) in operands}


def _whole(node: fx.Node) -> Any:
    """Return a key that is equal for two nodes that are the same tensor: equal memory, offset, sizes and strides."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    return _memory(node), str(value.storage_offset()), _described(value)


def _layers(nodes: Sequence[fx.Node], repeated: RepeatedLayers) -> list[LayerText]:
    """Return each repeated layer as text, or an empty list if two of them differ in operations or kinds of operands."""
    layers: list[LayerText] = []
    for number in range(repeated.count):
        layer = _spelled(_members(nodes, repeated, number))
        if layers and (layer.text != layers[0].text or not _same_operands(layer, layers[0])):
            return []
        layers.append(layer)
    return layers


def _spelled(members: Sequence[fx.Node]) -> LayerText:
    inside = {node: f"n{at}" for at, node in enumerate(members)}
    operands: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> str:
        return inside[node] if node in inside else operands.setdefault(node, f"x{len(operands)}")

    text = tuple(f"{_kind(node)} {_text((node.args, node.kwargs), name)}" for node in members)
    return LayerText(text, tuple(operands))


def _text(value: Any, name: Any) -> str:
    if isinstance(value, fx.Node):
        return str(name(value))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_text(item, name) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item, name)}' for key, item in value.items())}}}"
    return repr(value)


def _same_operands(one: LayerText, other: LayerText) -> bool:
    """Return whether operands have equal shapes, strides and devices; operands without known form must be identical."""
    if len(one.operands) != len(other.operands):
        return False
    for a, b in zip(one.operands, other.operands, strict=True):
        values = [node.meta.get("val") for node in (a, b)]
        # A symbolic length of one layer only: values that depend on it have no known shape, or the layers' texts would differ.
        lengths = all(isinstance(value, torch.SymInt) and not value.node.expr.is_number for value in values)
        if a is not b and not lengths and (not (texts := _described(values[0])) or texts != _described(values[1])):
            return False
    return True


# --- what makes folding unsound ---------------------------------------------------------------------------


def _memory(node: fx.Node) -> Any:
    """Return a key that is equal for nodes whose values share memory; a node without a known tensor shares memory with none."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _is_view_or_unknown(node: fx.Node) -> bool:
    """Return whether a node's result shares memory with one of its operands, or is not known to be a tensor."""
    return not isinstance(node.meta.get("val"), torch.Tensor) or _memory(node) in {_memory(given) for given in node.all_input_nodes}


def _apart(nodes: Sequence[fx.Node], repeated: RepeatedLayers, layers: Sequence[LayerText], outputs: Sequence[int]) -> bool:
    """Return whether all layers of ``repeated`` can become calls of one region without a change of results through shared memory.

    ``layers``: the operands of each layer. ``outputs``: indices, within a layer, of the nodes that the region returns. True if no operand
    that a layer writes shares memory with another of its operands, no operand is a computed view at an offset, and the outputs are tensors
    that share no memory with each other or with operands.
    """
    for number, layer in enumerate(layers):
        members = _members(nodes, repeated, number)
        given: dict[Any, list[fx.Node]] = defaultdict(list)
        for operand in layer.operands:
            value = operand.meta.get("val")
            if isinstance(value, torch.Tensor) and operand.op == "call_function" and value.storage_offset() != 0:
                return False
            given[_memory(operand)].append(operand)
        written = {_memory(node) for member in members for node in _written(member)}
        if any(len(given[memory]) > 1 for memory in written):
            return False
        returned = [_memory(members[at]) for at in outputs]
        if len(set(returned)) < len(returned) or any(memory in given for memory in returned):
            return False
        if any(not isinstance(members[at].meta.get("val"), torch.Tensor) for at in outputs):
            return False
    return True


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that a node may write."""
    if not isinstance(node.target, OpOverload):
        # An eager body of ours, which may write any plane that it is given.
        yield from node.all_input_nodes
        return
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        held = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        yield from (item for item in (held if isinstance(held, (list, tuple)) else [held]) if isinstance(item, fx.Node))


# --- replacing --------------------------------------------------------------------------------------------


def _replace(
    module: fx.GraphModule, nodes: Sequence[fx.Node], repeated: RepeatedLayers, layers: Sequence[LayerText], outputs: Sequence[int]
) -> None:
    """Replace each layer of ``repeated`` by a call of one region."""
    graph = module.graph
    # Torch caches traces by this name, so equal names must mean equal regions.
    texts = [*layers[0].text, *(_described(operand.meta.get("val")) for operand in layers[0].operands), str(outputs)]
    name = f"kvcompile_layer_{hashlib.sha256(chr(10).join(texts).encode()).hexdigest()[:16]}"
    setattr(module, name, _region(module, _members(nodes, repeated, 0), layers[0], outputs))
    moved: dict[fx.Node, fx.Node] = {}
    for number, layer in enumerate(layers):
        members = _members(nodes, repeated, number)
        with graph.inserting_before(members[-1].next):
            region = graph.get_attr(name)
            given = [moved.get(operand, operand) for operand in layer.operands]
            call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (region, name, *given))
            inside = set(members)
            for node, operand in _operands_given_back(members).items():
                # A reader after the call sees the operand as the region wrote it.
                node.replace_all_uses_with(operand, delete_user_cb=lambda user, inside=inside: user not in inside)  # type: ignore[misc]
            for place, at in enumerate(outputs):
                result = graph.call_function(operator.getitem, (call, place))
                result.meta = dict(members[at].meta)
                moved[members[at]] = result
                members[at].replace_all_uses_with(result, delete_user_cb=lambda user, inside=inside: user not in inside)  # type: ignore[misc]
        for node in reversed(members):
            graph.erase_node(node)
    module.recompile()


def _region(module: fx.GraphModule, members: Sequence[fx.Node], layer: LayerText, outputs: Sequence[int]) -> fx.GraphModule:
    """Return the nodes ``members`` of one layer as a separate graph module, from its operands to its ``outputs``, indices within it."""
    graph, env = fx.Graph(), {}
    for at, operand in enumerate(layer.operands):
        env[operand] = graph.placeholder(f"x{at}")
        env[operand].meta = dict(operand.meta)
    for node in members:
        env[node] = graph.node_copy(node, lambda item: env[item])
    graph.output(tuple(env[members[at]] for at in outputs))
    return fx.GraphModule(module, graph)
