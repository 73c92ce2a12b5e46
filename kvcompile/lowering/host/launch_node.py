"""One node of Inductor's graph for all kernels of an operator, with mutated operands as the operator's schema declares them.

To find the operands that a user-defined Triton kernel writes, torch compiles it to TTIR at every launch, once in tracing and once in
lowering: about a second a launch, and a layer may have a dozen. Here an operator stays whole until it is lowered. ``lower_launches``
then runs its body on fake tensors with a recorder (``launches``), and makes one node of the recorded launches: the operands that the caller
names as written are the node's mutations, tensors that the body made are the node's buffers, and each launch becomes a call in the
wrapper, by Inductor's own code for user-defined kernels. So the scheduler has one node in place of fifty.

Facts about torch 2.11 to 2.13 that only this file relies on:

    ``ir.UserDefinedTritonKernel.codegen``  reads ``kwargs``, ``grid``, ``fx_node`` and ``get_kernel_and_metadata()``
    ``ir.MutationOutput(layout, buffer, operation)``  is an output that declares a buffer as written by an operation
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
    """Return a fake tensor that stands for a realized buffer or view: with its size, strides, dtype and device."""
    with V.fake_mode:
        return torch.empty_strided(
            convert_shape_to_symint(node.get_size()), convert_shape_to_symint(node.get_stride()), dtype=node.get_dtype(),
            device=node.get_device(),
        )


def lower_launches(body: Callable[..., Sequence[torch.Tensor]], operands: Sequence[Any], written: Sequence[Any]) -> list[Any]:
    """Run ``body(recorder, *operands)`` on fake tensors, and return its result tensors as boxes; all recorded launches become one node.

    ``operands``: boxes, None, constants, or lists of them; the body gets fake tensors for boxes, and must allocate its results.
    ``written``: the boxes among the operands that the kernels write. Raises NotRecorded.
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
    """Raise NotRecorded unless every ``used`` tensor is a ``known`` one with the same shape and strides."""
    forms = {identity(tensor): (tensor.shape, tensor.stride()) for tensor in known}
    for tensor in used:
        if forms.get(identity(tensor)) != (tensor.shape, tensor.stride()):
            raise NotRecorded(found="a view")


class LaunchOutput(ir.InputsKernel):
    """A buffer that a launch sequence makes, registered in Inductor's graph. It is an ``InputsKernel``, so that boxes count it as realized.

    It is not an operation of the graph.
    """

    def __init__(self, layout: Any, maker: LaunchSequence) -> None:
        super().__init__(name=None, layout=layout, inputs=[])
        self.maker = maker
        self.name = V.graph.register_buffer(self)

    def get_defining_op(self) -> Any:
        """Return the launch sequence."""
        return self.maker

    def should_allocate(self) -> bool:
        """Return True: the wrapper allocates the buffer."""
        return True


class LaunchSequence(ir.ExternKernel):
    """The kernels of one operator, in order, as a node: reads its operands, makes results and scratch, writes its declared mutations.

    Making one registers it, and the buffers that it makes, in Inductor's graph. ``nodes``: the buffer of each operand, by ``identity`` of
    its fake tensor; ``results``: the tensors to return; ``written``: the boxes that it mutates.
    """

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
        """Assign a buffer to every tensor that only the kernels use; tensors of equal ``_form`` share one if their uses don't overlap."""
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
        """Return the node's outputs: the buffers that it makes, and its mutations."""
        return [*self.made, *self.mutation_outputs]

    def get_device(self) -> Any:
        """Return the device of all kernels."""
        return self.device

    def should_allocate(self) -> bool:
        """Return False: each output is allocated separately."""
        return False

    def get_unbacked_symbol_defs(self) -> OrderedSet[sympy.Symbol]:
        """Return an empty set: all sizes come from the operands."""
        return OrderedSet()

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> OrderedSet[sympy.Symbol]:
        """Return the symbols in operands, sizes, scalar arguments and grids."""
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
        """Emit the allocations of outputs and scratch, then the calls, then the freeing of scratch.

        Scratch has no users in the scheduler, which marked it as removed. Inductor plans reuse between nodes, not within one: here all of a
        node's allocations come before its frees.
        """
        for item in self.made:
            V.graph.removed_buffers.discard(item.get_name())
            wrapper.codegen_allocation(item)
        for call in self.calls:
            call.codegen(wrapper)
        for item in self.scratch:
            wrapper.codegen_free(item)


class KernelCall(ir.UserDefinedTritonKernel):
    """One launch of a Triton kernel, as an Inductor IR node.

    Not an operation of the graph: it has the attributes that the inherited ``codegen`` reads, and no mutation analysis.
    """

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
        """Operands that are buffers."""
        return list(self.inputs)

    @property
    def numbers(self) -> list[Any]:
        """Scalar arguments and the grid."""
        return [*self.constant_args, *self.grid[0]]

    def get_kernel_and_metadata(self) -> tuple[Any, Any, list[str], list[str]]:
        """Return the kernel and its only configuration; nothing is tuned, so no argument is restored or reset between runs."""
        import triton

        return self.launched, [] if self.warps is None else [triton.Config({}, num_warps=self.warps)], [], []


class PythonCall:
    """One call of an operator that returns nothing, written as a line of the Python wrapper that Inductor generates."""

    def __init__(self, target: Any, operands: list[Any]) -> None:
        self.target, self.operands = target, operands

    @property
    def buffers(self) -> list[Any]:
        """Operands that are tensors."""
        return [item for item in self.operands if isinstance(item, ir.IRNode)]

    @property
    def numbers(self) -> list[Any]:
        """Operands that are not tensors."""
        return [item for item in self.operands if not isinstance(item, ir.IRNode)]

    def codegen(self, wrapper: Any) -> None:
        """Write the call as a line of Inductor's Python wrapper."""
        spelled = (item.codegen_reference() if isinstance(item, ir.IRNode) else wrapper.val_to_arg_str(item) for item in self.operands)
        wrapper.writeline(f"torch.ops.{self.target!s}({', '.join(spelled)})")


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key (sizes, strides, dtype); tensors with equal keys can share a buffer."""
    return (*map(_expression, tensor.shape), *map(_expression, tensor.stride()), tensor.dtype)


def _expression(value: Any) -> Any:
    """Return a symbolic integer as Inductor's expression; any other value unchanged."""
    if not isinstance(value, torch.SymInt):
        return value
    expression = V.graph.sizevars.simplify(value.node.expr)
    return int(expression) if expression.is_number else expression
