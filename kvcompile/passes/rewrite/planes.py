"""Planes: placeholders of a rewritten graph for the planes of its stores."""

from __future__ import annotations

from torch import fx

from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.context import Context, Part
from kvcompile.passes.rewrite.rewritten import Binding


class Planes:
    """Creates the placeholders of each store at first use, after all other placeholders, and binds them to its slot."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.bindings: list[Binding] = []
        self._made: dict[Part, list[fx.Node]] = {}

    def of(self, slot: SlotPlan) -> list[fx.Node]:
        """Return all planes of a slot's store, in the layout's order."""
        part = slot.slot.part
        if part in self._made:
            return self._made[part]
        graph, captured = self.context.graph, self.context.captured
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        made: list[fx.Node] = []
        for spec in slot.layout.planes:
            with graph.inserting_after(last):
                last = graph.placeholder(f"kv{len(self._made)}_{slot.role.value}_{spec.name}")
            made.append(last)
        taken = sum(len(nodes) for nodes in self._made.values())
        self._made[part] = made
        index = next((entry.index for entry in captured.inputs if entry.node is slot.slot.placeholder), None)
        self.bindings.append(Binding(slot, index, slot.slot.outputs, taken))
        return made

    def written(self, slot: SlotPlan) -> list[fx.Node]:
        """Return the planes that an append writes."""
        return self.of(slot)[: slot.layout.written]

    def encoded(self, slot: SlotPlan) -> list[fx.Node]:
        """Return the planes that grow with tokens."""
        return self.of(slot)[: slot.layout.encoded]

    def from_first(self, emit: Emitter, slot: SlotPlan, positions: fx.Node) -> fx.Node:
        """Emit positions [B or 1, S] relative to the first position of the growing planes."""
        if slot.layout.first is None:
            return positions
        return emit.call(aten.sub.Tensor, positions, emit.call(aten.reshape.default, self.of(slot)[slot.layout.first], [1, 1]))

    def constant(self, slot: SlotPlan) -> list[fx.Node]:
        """Return the constant planes that attention reads."""
        read = slot.scheme.planes_read(slot.spec)
        return [node for spec, node in zip(slot.layout.planes[:read], self.of(slot)[:read], strict=True) if spec.constant]

    def encoding(self, slot: SlotPlan) -> list[fx.Node]:
        """Return the constant planes that encoding reads."""
        return [node for spec, node in zip(slot.layout.planes, self.of(slot), strict=True) if spec.encoding]

    def named(self, slot: SlotPlan) -> dict[str, fx.Node]:
        """Return all planes of a slot's store by name."""
        return {spec.name: node for spec, node in zip(slot.layout.planes, self.of(slot), strict=True)}
