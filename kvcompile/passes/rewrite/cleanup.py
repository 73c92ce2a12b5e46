"""Cleanup: erase nodes that the rewrite leaves unused, and detach sizes from tensors that leave the graph."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.effects import written_arguments
from kvcompile.passes.graph.shapes import op_name, value_of
from kvcompile.passes.rewrite.context import Context


def detach_sizes(context: Context) -> None:
    """Replace sizes of cache tensors that leave the graph by the graph's own symbols."""
    roots, chains = _roots(context), _chains(context)
    for old in list(context.captured.graph.nodes):
        if op_name(old) != "sym_size" or (context.effects.root.get(old.args[0]) not in roots and old.args[0] not in chains):
            continue
        context.copies[old].replace_all_uses_with(context.symbols.of(value_of(old)))


def drop_outputs(context: Context, output: fx.Node, dropped: tuple[int, ...]) -> int:
    """Remove the outputs with indices ``dropped``; return the number of outputs before."""
    returned = list(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(item for index, item in enumerate(returned) if index not in dropped),)
    return len(returned)


def erase_dead(context: Context) -> None:
    """Erase unused nodes; writes to rewritten caches and in-place steps on scores count as unused, all other writes stay."""
    copies, sites = context.copies, [item.site for item in context.plan.sites]
    writes = {copies[slot.slot.write.node] for slot in context.slots()}
    writes |= {copies[node] for site in sites if site.assembly for node in site.assembly.between}
    writes |= {copies[node] for site in sites for node in site.attention.nodes}
    writes |= {copies[node] for node in _chains(context)}
    for node in reversed(list(context.graph.nodes)):
        if node.op in {"placeholder", "output"} or node.users:
            continue
        if node in writes or not (written_arguments(node) or _effectful(node)):
            context.graph.erase_node(node)


def erase_caches(context: Context) -> tuple[int, ...]:
    """Erase the placeholders of cache tensors; return the indices of the caller's arguments that remain."""
    caches = {slot.slot.placeholder for slot in context.slots()}
    for entry in context.captured.inputs:
        if entry.node in caches:
            context.graph.erase_node(context.copies[entry.node])
    return tuple(entry.index for entry in context.captured.inputs if entry.node not in caches)


def _roots(context: Context) -> set[fx.Node]:
    """Return the nodes and placeholders of all cache tensors."""
    return {node for slot in context.slots() for node in (slot.slot.root, slot.slot.placeholder or slot.slot.root)}


def _chains(context: Context) -> set[fx.Node]:
    """Return the nodes that the rewrite leaves unread: those between sliding caches' tokens and attention, gathers from paged caches."""
    slots = [slot.slot for slot in context.slots()]
    root = context.effects.root
    gathered = {node for slot in slots if slot.block_table is not None for node in slot.path if root.get(node) is not slot.root}
    return gathered | {node for slot in slots if slot.sliding is not None for node in slot.sliding.chain}


def _effectful(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    return node.op == "call_function" and not isinstance(node.target, OpOverload) and node.is_impure()
