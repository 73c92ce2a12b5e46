"""Cleanup: what the rewrite leaves without a use goes, and sizes are asked of what stays."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.effects import written_arguments
from kvcompile.passes.graph.shapes import op_name, value_of
from kvcompile.passes.rewrite.context import Context


def detach_sizes(context: Context) -> None:
    """Take sizes that are asked of what leaves the graph from the graph's own symbols instead."""
    roots, chains = _roots(context), _chains(context)
    for old in list(context.captured.graph.nodes):
        if op_name(old) != "sym_size" or (context.effects.root.get(old.args[0]) not in roots and old.args[0] not in chains):
            continue
        context.copies[old].replace_all_uses_with(context.symbols.of(value_of(old)))


def drop_outputs(context: Context, output: fx.Node, dropped: tuple[int, ...]) -> int:
    """Take the results ``dropped`` out of the graph's output; how many there were."""
    returned = list(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(item for index, item in enumerate(returned) if index not in dropped),)
    return len(returned)


def erase_dead(context: Context) -> None:
    """Erase what is dead; the rewritten slots' own writes and steps in place on scores count as dead, every other write stays."""
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
    """Erase the placeholders of cache tensors; the indices of the caller's arguments that the graph still takes."""
    caches = {slot.slot.placeholder for slot in context.slots()}
    for entry in context.captured.inputs:
        if entry.node in caches:
            context.graph.erase_node(context.copies[entry.node])
    return tuple(entry.index for entry in context.captured.inputs if entry.node not in caches)


def _roots(context: Context) -> set[fx.Node]:
    """Cache tensors as the graph makes or gets them."""
    return {node for slot in context.slots() for node in (slot.slot.root, slot.slot.placeholder or slot.slot.root)}


def _chains(context: Context) -> set[fx.Node]:
    """Nodes that lead from a sliding cache's past and new tokens to what is read and kept, and what is gathered from a paged cache."""
    slots = [slot.slot for slot in context.slots()]
    root = context.effects.root
    gathered = {node for slot in slots if slot.block_table is not None for node in slot.path if root.get(node) is not slot.root}
    return gathered | {node for slot in slots if slot.sliding is not None for node in slot.sliding.chain}


def _effectful(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    return node.op == "call_function" and not isinstance(node.target, OpOverload) and node.is_impure()
