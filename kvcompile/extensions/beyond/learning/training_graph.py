"""The backend of training: Dynamo's cache-less graph with the hard quantizer between each attention and its keys and values.

::

    k = rope(k_proj(x));  out = sdpa(q, repeat(k), repeat(v), is_causal=True)
    after:
    out = sdpa(q, repeat(hard_quantize(k, *tables)), repeat(hard_quantize(v, *tables)), is_causal=True)

Tables are inputs after all others, so that autograd reaches them and a recompile does not make new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvcompile.extensions.beyond.learning.parameters import Parameters, SlotParameters
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig, hard_quantize
from kvcompile.lowering.host.inductor_entry import compile_for_training
from kvcompile.lowering.host.torch_api import lookup_backend
from kvcompile.passes.capture.attributes import lifted
from kvcompile.passes.capture.capture import Captured, capture
from kvcompile.passes.capture.nested import inlined
from kvcompile.passes.graph.emit import Emitter, aten
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.sites import Refusal, Slot
from kvcompile.passes.match.uncached import UncachedSite, find, operand_heads
from kvcompile.passes.plan.plan import SlotPlan
from kvcompile.passes.rewrite.new_tokens import new_tokens
from kvcompile.passes.rewrite.symbols import Symbols
from kvcompile.settings import Inner
from kvcompile.types import Role, SlotSpec


class TrainingBackend:
    """A Dynamo backend for learning: inserts quantizers, and makes their parameters when it first meets an attention.

    ``memory_budget``: the share of activations that Inductor's partitioner keeps for the backward pass; it recomputes the others.
    """

    def __init__(self, parameters: Parameters, rule: QuantizerConfig, inner: Inner = Inner.INDUCTOR, memory_budget: float = 1.0) -> None:
        self.parameters, self.rule, self.inner, self.memory_budget = parameters, rule, inner, memory_budget
        self.refusals: list[Refusal] = []
        self.ran: set[int] = set()
        """Identities of the slots whose quantizers ran since this was last emptied."""
        self.__name__ = "kvcompile_learning"

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = lifted(inlined(gm))
        captured = capture(graph.module, [*example_inputs, *graph.tensors], attributes=len(graph.tensors))
        module, slots = self.quantized(captured)
        tables = [operand for slot in slots for operand in slot.operands]
        compiled = self._compiled(module, captured, tables)
        ids = {id(slot) for slot in slots}

        def run(*args: Any) -> Any:
            self.ran |= ids
            return compiled(*args, *graph.tensors, *tables)

        return run

    def quantized(self, captured: Captured) -> tuple[fx.GraphModule, list[SlotParameters]]:
        """Return a copy of the graph with quantizers, and each quantizer's parameters, whose four tensors are the graph's last inputs.

        Adds the refusals of the graph's attentions to ``refusals``.
        """
        found = find(captured)
        self.refusals += found.refusals
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(captured.graph, copies))
        for old, new in copies.items():
            new.meta = dict(old.meta)
        insert = Insertion(self, captured, graph, copies)
        for site in found.sites:
            insert.site(site)
        graph.lint()
        return fx.GraphModule(captured.module, graph), insert.slots

    def _compiled(self, module: fx.GraphModule, captured: Captured, tables: list[torch.Tensor]) -> Callable[..., Any]:
        if self.inner is Inner.EAGER:
            return module.forward
        fakes = [*captured.fakes, *(captured.fake_mode.from_tensor(table, static_shapes=True) for table in tables)]
        if self.inner is Inner.AOT_EAGER:
            return lookup_backend("aot_eager")(module, fakes)  # type: ignore[arg-type]
        return compile_for_training(module, fakes, self.memory_budget)


class Insertion:
    """Inserts the quantizers into one graph; ``slots``: the parameters of the quantizers, whose tensors are the added inputs, in order."""

    def __init__(self, backend: TrainingBackend, captured: Captured, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        self.backend, self.graph, self.copies = backend, graph, copies
        self.symbols = Symbols(captured, graph, copies, set())
        self.slots: list[SlotParameters] = []
        self.mapped: dict[Any, fx.Node] = {}

    def site(self, site: UncachedSite) -> None:
        """Insert quantizers between an attention and its keys and values; a tensor that two attentions share gets one quantizer."""
        for slot, role in ((site.key, Role.KEY), (site.value, Role.VALUE)):
            operand, roles = (site.attention.k, site.attention.k_roles) if role is Role.KEY else (site.attention.v, site.attention.v_roles)
            readers = [self.copies[node] for node in site.attention.nodes if node in operand.users]
            first = min((self.copies[node] for node in operand.users if node in site.attention.nodes), key=self._place)
            emit = Emitter(self.graph, first, self.symbols.of, self.copies)
            if slot.part not in self.mapped:
                self.mapped[slot.part] = self._mapped(emit, slot, role, site.path)
            repeated = _repeated(emit, self.mapped[slot.part], slot, roles, operand_heads(site))
            if value_of(operand).dtype != value_of(slot.root).dtype:
                repeated = emit.call(aten.to.dtype, repeated, value_of(operand).dtype)
            for reader in readers:
                reader.replace_input_with(self.copies[operand], repeated)

    def _place(self, node: fx.Node) -> int:
        return next(at for at, other in enumerate(self.graph.nodes) if other is node)

    def _mapped(self, emit: Emitter, slot: Slot, role: Role, path: str) -> fx.Node:
        """Emit the quantized new tokens [B, K, S, D] before their first reader."""
        heads, head_dim = slot.heads, slot.head_dim
        root, scheme = value_of(slot.root), self.backend.parameters.scheme
        spec = SlotSpec(heads, head_dim, root.dtype, role)
        scheme.check(spec)
        parameters = self.backend.parameters.of(path, role, heads, head_dim, root.device)
        plan = SlotPlan(slot, role, scheme, spec, scheme.layout(spec))
        tokens, rule = new_tokens(emit, plan), self.backend.rule
        tables = [self._input(f"{role.value}{len(self.slots)}_{at}") for at in range(len(parameters.operands))]
        self.slots.append(parameters)
        return emit.call(hard_quantize, tokens, *tables, rule.bits, rule.scale_dtype, rule.window)

    def _input(self, name: str) -> fx.Node:
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            return self.graph.placeholder(f"kv_table_{name}")


def _repeated(emit: Emitter, tokens: fx.Node, slot: Slot, roles: tuple[str, ...], groups: int) -> fx.Node:
    """Emit cache tokens [B, K, S, D] as the operand that an attention reads, and return its node.

    Heads are repeated ``groups`` times, or tiled where the slot's are; dims are ordered as ``roles``; channels are multiplied by the slot's
    factor.
    """
    if slot.factor != 1.0:
        tokens = emit.call(aten.mul.Scalar, tokens, slot.factor)
    if groups > 1:
        # Query head k * groups + g reads kv head k, or g * heads + k if they are tiled.
        tokens = emit.call(aten.unsqueeze.default, tokens, 1 if slot.tiled else 2)
        shape = [-1, groups, slot.heads, -1, -1] if slot.tiled else [-1, slot.heads, groups, -1, -1]
        tokens = emit.call(aten.flatten.using_ints, emit.call(aten.expand.default, tokens, shape), 1, 2)
    wanted = tuple(role.replace("T", "S") for role in roles)
    return emit.from_heads(tokens, wanted, slot.heads * groups, groups)
