"""CPU lowering of ``kvcompile::attend``: an out-of-tree Inductor C++ template.

The kernel is part of Inductor's output module, with Inductor's own kernels: planes and masks are read in place by
their strides, sizes that change between steps (batch, queries, pages) stay symbols, head counts and widths
are constants. There is one configuration, so nothing is autotuned. Pointwise users are not fused into it
(``no_fuse_buffer_names``): they are as small as the result, and the template would have to end in their code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from kvcompile import schemes
from kvcompile.lowering.codegen.expressions import CPP_TYPES
from kvcompile.lowering.cpu import matrix as cpp_matrix
from kvcompile.lowering.cpu import template
from kvcompile.lowering.cpu import vectors as cpp_vectors
from kvcompile.lowering.host.buffers import realize, static
from kvcompile.lowering.host.inductor_api import CppTemplate, CppTemplateKernel, Placeholder, V, cexpr_index, ir, parallel_num_threads
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.types import KernelFormat, Role, SlotSpec

TILE = 64
"""Tokens decoded at a time: 64 rows of 128 floats are 32 KB, most of an L1 cache."""
MAX_ROWS = 64
"""Rows (queries x heads of a group) that share one decoded tile."""
MIN_SPLIT = 256
"""Tokens below which splitting a kv head between threads does not pay."""


@dataclass(frozen=True)
class EncodedSlot:
    """One encoded slot: its realized planes, format, and scheme text."""

    planes: tuple[ir.IRNode, ...]
    fmt: KernelFormat
    spelled: str

    def source(self, name: str) -> str:
        """Return the C++ struct ``name`` of the slot."""
        scale = self.planes[1].get_dtype() if self.fmt.scaled else None
        words = static(self.planes[0].get_size()[-1])
        step = self.planes[0].get_stride()[-2]
        row_step = int(step) if isinstance(step, (int, sympy.Integer)) else 0
        return cpp_vectors.side_source(name, self.fmt, words, row_step, scale, cpp_matrix.unpacks_to_bfloat16(self.fmt))


@dataclass(frozen=True)
class Operands:
    """Realized operands of one ``attend``, scalars included; optional masks are None."""

    q: ir.IRNode
    keys: EncodedSlot
    values: EncodedSlot
    hi: ir.IRNode
    lo: ir.IRNode | None
    keep: ir.IRNode | None
    bias: ir.IRNode | None
    sinks: ir.IRNode | None
    scale: float
    softcap: float
    fill: float | None
    log_sums: bool

    def nodes(self) -> list[ir.IRNode]:
        """Return every tensor that the kernel reads."""
        given = (self.q, *self.keys.planes, *self.values.planes, self.hi, self.lo, self.keep, self.bias, self.sinks)
        return [node for node in given if node is not None]


def lower_attend_cpu(given: AttendOperands[ir.TensorBox]) -> ir.TensorBox | None:
    """Return the template buffer with ``attend``'s result, contiguous; None if tables or static scales are not float32."""
    batch, heads, queries, head_dim = given.q.get_size()
    kv_heads, width_v = static(given.keys[0].get_size()[2]), static(given.value_dim)
    operands = Operands(
        q=realize(given.q),
        keys=_side(given.keys, given.key_scheme, static(head_dim), Role.KEY),
        values=_side(given.values, given.value_scheme, width_v, Role.VALUE),
        hi=realize(given.hi), lo=_maybe(given.lo), keep=_maybe(given.keep), bias=_maybe(given.bias), sinks=_maybe(given.sinks),
        scale=float(given.scale), softcap=float(given.softcap), fill=given.fill, log_sums=given.log_sums,
    )
    size = [batch, sympy.Integer(static(heads)), queries, sympy.Integer(width_v + given.log_sums)]
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32 if given.log_sums else given.q.get_dtype(), size)
    sides = (operands.keys, operands.values)
    if any(side.fmt.ends_constant and side.planes[side.fmt.planes - 1].get_dtype() != torch.float32 for side in sides):
        return None
    template = AttendTemplate(operands, layout, kv_heads, static(heads) // kv_heads)
    return template.buffer()


def _maybe(box: ir.TensorBox | None) -> ir.IRNode | None:
    return None if box is None else realize(box)


def _side(planes: Sequence[ir.TensorBox], spelled: str, head_dim: int, role: Role) -> EncodedSlot:
    scheme = schemes.parse(spelled)
    heads = static(planes[0].get_size()[2])
    fmt = scheme.format(SlotSpec(heads, head_dim, planes[0].get_dtype(), role))
    return EncodedSlot(tuple(realize(plane) for plane in planes), fmt, scheme.spec())


class AttendTemplate(CppTemplate):
    """The C++ template of one ``attend``; its buffer is built without ``generate``, which is needed only for autotuning."""

    def __init__(self, operands: Operands, layout: ir.Layout, kv_heads: int, group: int) -> None:
        super().__init__("kvcompile_attend", operands.nodes(), layout, parallel_num_threads())
        self.operands = operands
        self.kv_heads = kv_heads
        self.group = group

    def buffer(self) -> ir.TensorBox:
        """Return the attention's result as a TensorBox over a buffer that calls this kernel and is never fused."""
        buffer = ir.CppTemplateBuffer(
            layout=self.layout, inputs=self.input_nodes, make_kernel_render=self.make_kernel_render, template=self,  # type: ignore[arg-type]
            choice=None,
        )
        V.graph.no_fuse_buffer_names.add(buffer.get_name())
        return ir.TensorBox.create(buffer)

    def make_kernel_render(
        self, template_node: ir.CppTemplateBuffer, flag_template_buffer_has_other_users: bool,
        epilogue_nodes: list[ir.IRNode] | None = None,
    ) -> tuple[CppTemplateKernel, Callable[[], str]]:
        """Return the kernel, and a function that renders its source when Inductor's scheduler asks for it."""
        del flag_template_buffer_has_other_users
        assert not epilogue_nodes, "kept away by no_fuse_buffer_names"
        kernel = CppTemplateKernel(kernel_name=str(Placeholder.KERNEL_NAME), num_threads=self.num_threads)
        return kernel, functools.partial(kernel.render, self, output=template_node)

    def render(self, kernel: CppTemplateKernel, output: ir.Buffer, **kwargs: Any) -> str:  # type: ignore[override]
        """Return the C++ source of the template for Inductor's ``kernel`` and the buffer ``output``."""
        del kwargs
        ops = self.operands
        # One buffer may be several operands (keys and values of a combined cache): one argument for each buffer.
        arguments: dict[str, Any] = {}
        for node in self.input_nodes:
            arguments.setdefault(node.get_name(), node)
        offsets = [node.get_layout().offset for node in self.input_nodes]
        definition = kernel.def_kernel(
            inputs={f"in{i}": node for i, node in enumerate(arguments.values())}, outputs={"out": output},
            extra_sizevars=offsets,
        )
        return self._template_from_string(template.ENTRY).render(
            template=self, kernel=kernel, definition=definition, fields=_Fields(kernel, ops, output).texts,
            key_scheme=ops.keys.spelled, value_scheme=ops.values.spelled,
            vectors=template.VECTORS, sides=ops.keys.source("Key") + ops.values.source("Value"),
            blocks=template.BLOCKS, decode=template.DECODE, fused=template.FUSED,
            matrix=template.MATRIX, attend=template.ATTEND, run=template.RUN,
            q_type=_ctype(ops.q), bias_type=_ctype(ops.bias), sink_type=_ctype(ops.sinks),
            has_bias=str(ops.bias is not None).lower(), has_keep=str(ops.keep is not None).lower(),
            tile=TILE, max_rows=MAX_ROWS, min_split=MIN_SPLIT, heads=self.kv_heads, group=self.group,
            scale=_float(ops.scale), softcap=_float(ops.softcap),
            log_sums=str(ops.log_sums).lower(), fills=str(ops.fill is not None).lower(), fill=_float(ops.fill or 0.0),
        )


class _Fields:
    """C++ text of each field of ``Problem``, from sizes, strides and offsets that may be symbols."""

    def __init__(self, kernel: CppTemplateKernel, ops: Operands, output: ir.Buffer) -> None:
        self.kernel = kernel
        self.texts: dict[str, str] = {}
        self.add("q", ops.q, ("batch", "head", "query", "width"))
        self.texts["out"] = kernel.args.output(output.get_name())
        for name, side in (("keys", ops.keys), ("values", ops.values)):
            self.plane(f"{name}.words", f"{name}.word", side.planes[0])
            if side.fmt.scaled:
                self.plane(f"{name}.scales", f"{name}.scale", side.planes[1])
            if side.fmt.zeros:
                self.plane(f"{name}.zeros", f"{name}.zero", side.planes[2])
            if side.fmt.static:
                self.plane(f"{name}_static", f"{name}_by", side.planes[side.fmt.planes - 1])
            if side.fmt.levels:
                self.plane(f"{name}_table", f"{name}_entry", side.planes[side.fmt.planes - 1])
        pages = ops.keys.planes[0].get_size()
        self.texts |= {"batch": self.text(ops.q.get_size()[0]), "queries": self.text(ops.q.get_size()[2])}
        self.texts |= {"pages": self.text(pages[0]), "rows_per_page": self.text(pages[3])}
        self.add("hi", ops.hi, ("batch", "query"))
        self.add("lo", ops.lo, ("batch", "query"))
        self.add("keep", ops.keep, ("batch", "token"), tokens=True)
        self.add("bias", ops.bias, ("batch", "head", "query", "token"), tokens=True)
        self.add("sinks", ops.sinks, ("head",))

    def text(self, expr: sympy.Expr) -> str:
        return f"static_cast<int64_t>({cexpr_index(self.kernel.rename_indexing(expr))})"

    def pointer(self, node: ir.IRNode) -> str:
        return f"{self.kernel.args.input(node.get_name())} + {self.text(node.get_layout().offset)}"

    def add(self, name: str, node: ir.IRNode | None, axes: tuple[str, ...], tokens: bool = False) -> None:
        """Add the pointer and the strides of ``node`` to the fields, under ``name``; do nothing if it is None.

        An axis of size 1 gets stride 0, except the token and width axes. ``tokens``: whether to add the size of the last axis too.
        """
        if node is None:
            return
        self.texts[name] = self.pointer(node)
        for axis, size, stride in zip(axes, node.get_size(), node.get_stride(), strict=True):
            broadcast = "" if axis in ("token", "width") else f"{self.text(size)} == 1 ? 0 : "
            self.texts[f"{name}_{axis}"] = broadcast + self.text(stride)
        if tokens:
            self.texts[f"{name}_tokens"] = self.text(node.get_size()[-1])

    def plane(self, pointer: str, strides: str, node: ir.IRNode) -> None:
        self.texts[pointer] = self.pointer(node)
        self.texts[strides] = "{" + ", ".join(self.text(stride) for stride in node.get_stride()) + "}"


def _ctype(node: ir.IRNode | None) -> str:
    """Return the C++ element type of ``node``; float for None."""
    if node is None:
        return "float"
    return "bool" if node.get_dtype() == torch.bool else CPP_TYPES[node.get_dtype()]


def _float(value: float) -> str:
    return f"static_cast<float>({value!r})"
