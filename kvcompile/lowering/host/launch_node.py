"""A node of Inductor's graph that stands for all kernels of one operator, with mutated operands as the operator declares them.

torch finds out what a Triton kernel of the user's writes by compiling it to TTIR, at every launch, while it traces and again while it
lowers: about a second a launch, and a layer may have a dozen. Here an operator stays whole until it is lowered. ``lower_launches``
then runs its body on stand-ins with a recorder (``launches``), and makes one node of what was recorded: the operands that the caller
says are written are the node's mutations, tensors that the body made are the node's buffers, and each launch becomes a call in the
wrapper, by the code that Inductor has for kernels of the user's. So the scheduler has one node in place of fifty.

Facts about torch 2.11 to 2.13 that this relies on, each used here alone:

    ``ir.UserDefinedTritonKernel.codegen``  reads ``kwargs``, ``grid``, ``fx_node`` and ``get_kernel_and_metadata()``
    ``ir.MutationOutput(layout, buffer, operation)``  is an output that says which buffer an operation writes
    an operation may have several outputs, and the scheduler allocates those whose ``should_allocate()`` is true
    outputs without users are in ``V.graph.removed_buffers`` by the time of code generation, and are then neither allocated nor freed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch

from kvcompile.lowering.host.buffers import realize
from kvcompile.lowering.host.inductor_api import V, convert_shape_to_symint, ir
from kvcompile.lowering.host.launches import KernelLaunch, NotRecorded, OnlyRoom, Recorder, Step, identity
from kvcompile.lowering.host.torch_api import OrderedSet, tree_map


def stand_in(node: Any) -> torch.Tensor:
    """A fake tensor with the size, strides, dtype and device of a realized buffer or view."""
    with V.fake_mode:
        return torch.empty_strided(
            convert_shape_to_symint(node.get_size()), convert_shape_to_symint(node.get_stride()), dtype=node.get_dtype(),
            device=node.get_device(),
        )


def lower_launches(body: Callable[..., Sequence[torch.Tensor]], operands: Sequence[Any], written: Sequence[Any]) -> list[Any]:
    """The tensors that ``body(recorder, *operands)`` returns, as boxes, with everything that it starts as one node.

    ``operands``: boxes, None, constants, lists of them; the body gets fake tensors for the boxes, and makes what it returns.
    ``written``: those boxes among the operands that the kernels write.
    """
    nodes: dict[int, Any] = {}
    kept: list[torch.Tensor] = []

    def stood(operand: Any) -> Any:
        if not isinstance(operand, ir.TensorBox):
            return operand
        node = realize(operand)
        fake = stand_in(node)
        kept.append(fake)
        nodes[identity(fake)] = ir.InputsKernel.unwrap_storage_for_input(node)
        return fake

    given = tree_map(stood, list(operands), is_leaf=lambda item: isinstance(item, ir.IRNode))
    recorder = Recorder()
    with V.fake_mode, OnlyRoom() as mode:
        results = list(body(recorder, *given))
    check_whole([*kept, *mode.room], [*(tensor for step in recorder.steps for tensor in step.tensors), *results])
    node = LaunchSequence(recorder, nodes, results, written)
    return [ir.TensorBox.create(node.buffer_of[identity(result)]) for result in results]


def check_whole(known: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
    """Raise NotRecorded unless every tensor that is ``used`` is one of those ``known``, whole."""
    forms = {identity(tensor): (tensor.shape, tensor.stride()) for tensor in known}
    for tensor in used:
        if forms.get(identity(tensor)) != (tensor.shape, tensor.stride()):
            raise NotRecorded(found="a view")


class LaunchOutput(ir.InputsKernel):
    """A buffer that a launch sequence makes; an ``InputsKernel``, since boxes take those for realized, but no operation of the graph."""

    def __init__(self, layout: Any, maker: LaunchSequence) -> None:
        super().__init__(name=None, layout=layout, inputs=[])
        self.maker = maker
        self.name = V.graph.register_buffer(self)

    def get_defining_op(self) -> Any:
        """The launch sequence."""
        return self.maker

    def should_allocate(self) -> bool:
        """The wrapper allocates it."""
        return True


class LaunchSequence(ir.ExternKernel):
    """Kernels of one operator, in order: reads its operands, makes its results and scratch, writes what the operator declares."""

    def __init__(self, recorder: Recorder, nodes: dict[int, Any], results: Sequence[torch.Tensor], written: Sequence[Any]) -> None:
        self.device = next(iter(nodes.values())).get_device()
        super().__init__(None, ir.NoneLayout(device=self.device), list(nodes.values()))
        self.made: list[LaunchOutput] = []
        self.buffer_of = dict(nodes)
        for result in results:
            self.buffer_of[identity(result)] = self._make(result)
        self._place_scratch(recorder)
        self.scratch = self.made[len(results) :]
        self.calls = [self._call(step) for step in recorder.steps]
        self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=self.device), box, self) for box in written]
        V.graph.register_operation(self)

    def _place_scratch(self, recorder: Recorder) -> None:
        """Give every tensor that only the kernels know a buffer; tensors of one form whose launches do not overlap share one."""
        returned = len(self.made)
        last = {identity(tensor): index for index, step in enumerate(recorder.steps) for tensor in step.tensors}
        free: dict[tuple[Any, ...], list[LaunchOutput]] = {}
        for index, step in enumerate(recorder.steps):
            used = {identity(tensor): tensor for tensor in step.tensors}
            for key, tensor in used.items():
                if key not in self.buffer_of:
                    shared = free.get(_form(tensor))
                    self.buffer_of[key] = shared.pop() if shared else self._make(tensor)
            for key, tensor in used.items():
                if last[key] == index and any(self.buffer_of[key] is item for item in self.made[returned:]):
                    free.setdefault(_form(tensor), []).append(self.buffer_of[key])

    def _make(self, tensor: torch.Tensor) -> LaunchOutput:
        size, stride = ([_expression(x) for x in each] for each in (tensor.shape, tensor.stride()))
        made = LaunchOutput(ir.FixedLayout(tensor.device, tensor.dtype, size, stride), self)
        self.made.append(made)
        return made

    def _call(self, step: Step) -> KernelCall | PythonCall:
        def known(operand: Any) -> Any:
            return self.buffer_of[identity(operand)] if isinstance(operand, torch.Tensor) else _expression(operand)

        if isinstance(step, KernelLaunch):
            arguments = {name: known(operand) for name, operand in step.arguments.items()}
            return KernelCall(step.kernel, [_expression(x) for x in step.grid], arguments, step.warps, self.device)
        return PythonCall(step.target, [known(operand) for operand in step.operands])

    def get_outputs(self) -> list[Any]:
        """Return the node's outputs: what it makes, and its mutations."""
        return [*self.made, *self.mutation_outputs]

    def get_device(self) -> Any:
        """The device of all kernels."""
        return self.device

    def should_allocate(self) -> bool:
        """Buffers are allocated one by one."""
        return False

    def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
        """None: sizes are those of the operands."""
        return OrderedSet()

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> OrderedSet[sympy.Symbol]:
        """Symbols of operands, sizes and grids."""
        found = super().get_free_symbol_uses(unbacked_only)
        for expression in self._expressions():
            found |= ir.get_free_symbols(expression, unbacked_only)
        return found

    def _expressions(self) -> Iterator[sympy.Expr]:
        for made in self.made:
            yield from (x for x in (*made.get_size(), *made.get_stride()) if isinstance(x, sympy.Expr))
        for call in self.calls:
            yield from (x for x in call.numbers if isinstance(x, sympy.Expr))

    def codegen(self, wrapper: Any) -> None:
        """Emit the calls between the allocation of what has none yet and the freeing of scratch.

        Scratch has no users in the scheduler, which took it for dead. Inductor plans reuse between nodes, not within one: here all of a
        node's allocations stand before its frees.
        """
        for item in self.made:
            V.graph.removed_buffers.discard(item.get_name())
            wrapper.codegen_allocation(item)
        for call in self.calls:
            call.codegen(wrapper)
        for item in self.scratch:
            wrapper.codegen_free(item)


class KernelCall(ir.UserDefinedTritonKernel):
    """One launch. Not an operation of the graph: it only has what the inherited ``codegen`` reads, and nobody asks what it writes."""

    def __init__(self, kernel: Any, grid: list[Any], arguments: dict[str, Any], warps: int | None, device: Any) -> None:
        constants = tuple(item for item in arguments.values() if not isinstance(item, ir.IRNode))
        ir.ExternKernel.__init__(
            self, None, ir.NoneLayout(device=device), [item for item in arguments.values() if isinstance(item, ir.IRNode)], constants,
            arguments,
        )
        self.device, self.grid, self.launched, self.warps = device, [grid], kernel, warps
        self.ordered_kwargs_for_cpp_kernel = list(arguments)

    @property
    def buffers(self) -> list[Any]:
        """Operands."""
        return list(self.inputs)

    @property
    def numbers(self) -> list[Any]:
        """Scalar arguments and the grid."""
        return [*self.constant_args, *self.grid[0]]

    def get_kernel_and_metadata(self) -> tuple[Any, Any, list[str], list[str]]:
        """The kernel and its only configuration; nothing is tuned, so nothing is restored or reset in between."""
        import triton

        return self.launched, [] if self.warps is None else [triton.Config({}, num_warps=self.warps)], [], []


class PythonCall:
    """One call of an operator that returns nothing, as a line of the wrapper."""

    def __init__(self, target: Any, operands: list[Any]) -> None:
        self.target, self.operands = target, operands

    @property
    def buffers(self) -> list[Any]:
        """Operands that are tensors."""
        return [item for item in self.operands if isinstance(item, ir.IRNode)]

    @property
    def numbers(self) -> list[Any]:
        """The other operands."""
        return [item for item in self.operands if not isinstance(item, ir.IRNode)]

    def codegen(self, wrapper: Any) -> None:
        """Write the line."""
        spelled = (item.codegen_reference() if isinstance(item, ir.IRNode) else wrapper.val_to_arg_str(item) for item in self.operands)
        wrapper.writeline(f"torch.ops.{self.target!s}({', '.join(spelled)})")


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that tensors share which can lie in one buffer."""
    return (*map(_expression, tensor.shape), *map(_expression, tensor.stride()), tensor.dtype)


def _expression(value: Any) -> Any:
    """A symbolic integer as Inductor has it; everything else as it is."""
    if not isinstance(value, torch.SymInt):
        return value
    expression = V.graph.sizevars.simplify(value.node.expr)
    return int(expression) if expression.is_number else expression
