"""Which kernel runs an ``attend``: the kernels of each device in order, and why one does not know a site.

Inductor's lowering, ``explain``, ``dump`` and the report all ask ``choose``, so that none of them names a kernel that does not run.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import fx

from kvcompile import schemes
from kvcompile.lowering.certificate.report_op import report_site
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.rooms import rooms
from kvcompile.types import PAGE, Role, SlotSpec

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class AttendOperands:
    """The facts that choose a kernel: the device, both slots with their spelled schemes, and which optional operands are given."""

    device: str
    slots: tuple[tuple[str, SlotSpec], ...]
    dtype: torch.dtype = torch.float32
    page_rows: int = PAGE
    recent: bool = False
    rotation: bool = False
    more: bool = False


@dataclasses.dataclass(frozen=True)
class AttendKernel:
    """A kernel of one device, or of any; ``gap`` says why it does not know an attention, None where it does."""

    name: str
    device: str | None
    gap: Callable[[AttendOperands], str | None]


def _cuda_gap(operands: AttendOperands) -> str | None:
    if operands.more:
        return "keys in two planes, as of a latent with its rotary part"
    if operands.dtype not in QUERY_DTYPES:
        return f"queries in {operands.dtype}"
    if operands.page_rows & (operands.page_rows - 1):
        return f"pages of {operands.page_rows} tokens, no power of two"
    return None


def _cpu_gap(operands: AttendOperands) -> str | None:
    for text, slot in operands.slots:
        scheme = schemes.parse(text)
        if not scheme.format(slot).symmetric:
            return f"zero points, tables or scales of several tokens ({scheme.name})"
    given = {"newest tokens in full precision": operands.recent, "keys stored before RoPE": operands.rotation,
             "keys in two planes": operands.more}
    return next((what for what, there in given.items() if there), None)


TRITON = AttendKernel("Inductor Triton template", "cuda", _cuda_gap)
CPP = AttendKernel("Inductor C++ template", "cpu", _cpu_gap)
EAGER = AttendKernel("eager body", None, lambda operands: None)

KERNELS = (TRITON, CPP, EAGER)
"""In the order in which they are asked."""


def choose(operands: AttendOperands) -> tuple[AttendKernel, str | None]:
    """The first kernel of the device that knows the attention, and why the one before it does not, where there is one."""
    why = None
    for kernel in KERNELS:
        if kernel.device in {None, operands.device}:
            gap = kernel.gap(operands)
            if gap is None:
                return kernel, why
            why = gap
    raise AssertionError("the eager body knows everything")


def operands_of(node: fx.Node, device: str, slots: Mapping[str, SlotSpec]) -> AttendOperands:
    """The facts of an ``attend`` node of a rewritten graph; ``slots``: those of its stores by their spelled schemes."""
    given = inspect.signature(ops.attend_meta).bind(*node.args, **node.kwargs).arguments
    pair = tuple(
        (text, slots.get(text, SlotSpec(1, PAGE, torch.float32, role)))
        for text, role in ((given["key_scheme"], Role.KEY), (given["value_scheme"], Role.VALUE))
    )
    recent, rotation, more = (bool(given.get(name)) for name in ("recent", "rotation", "more"))
    return AttendOperands(device, pair, recent=recent, rotation=rotation, more=more)


def kernel_lines(graph: fx.Graph, device: str, slots: Mapping[str, SlotSpec], sites: int, compiled: bool = True) -> str:
    """Which operations the ``sites`` of a rewritten graph became and what runs them, counted; not ``compiled``: by eager bodies."""
    found: Counter[str] = Counter()
    attends, own = 0, {room.operation: room for room in rooms()}
    for node in graph.nodes:
        if node.target is ops.attend:
            attends += 1
            kernel, why = choose(operands_of(node, device, slots)) if compiled else (EAGER, None)
            found[f"attend ({kernel.name}{f': {why}' if why else ''})"] += 1
        elif (room := own.get(node.target)) is not None:
            attends += 1
            found[f"{node.target.__name__.partition('.')[0]} ({room.runs(device, compiled)})"] += 1
        elif node.target is report_site:
            found[f"report_site ({'tensor code' if device == 'cuda' and compiled else 'eager body'})"] += 1
    appends = sum(node.target in {ops.append, ops.append_window} for node in graph.nodes)
    # Other attentions of the graph may be SDPA too; of the sites it is those that have no attend.
    found["scaled_dot_product_attention"] = sites - attends
    found[f"append ({'compiled with the graph' if compiled else 'eager body'})"] = appends
    return ", ".join(f"{count} x {name}" for name, count in found.items() if count)
