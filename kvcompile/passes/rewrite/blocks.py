"""Blocks: whether attention can read a pool's tokens in place, block by block, through a table, instead of as gathered codes.

::

    read = gather(planes, block_table * 16 + arange(16), "int8")
    out  = attend(q, read, ..., hi)                               ->   out = attend_blocks(q, planes, block_table, 16, hi, window, ...)

A kernel reads blocks of 16, 32 or 64 tokens; a pool whose pages are a multiple of 16 tokens consists of such blocks. Each row must have one
new token: the tokens that it sees are then given by a length, whatever mask the model computed. The tokens of prompts are gathered, and
kernels for many rows of queries attend to them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvcompile.passes.graph.dynamo import OpOverload
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.pullback import PULLBACKS
from kvcompile.passes.graph.shapes import is_tensor, op_name, same, size_along, value_of
from kvcompile.passes.match.paged_places import Places
from kvcompile.passes.match.sites import Bounds
from kvcompile.passes.plan.plan import SitePlan
from kvcompile.schemes import Scheme
from kvcompile.types import PAGE

LEAST = 16
"""Fewest tokens of a block that a kernel reads in place."""


@dataclass(frozen=True)
class PoolBlocks:
    """The blocks of a pool that one attention reads: ``every`` tokens each, ``entries`` in a row of the table (an int or a SymInt).

    ``window``: number of tokens up to its limit that a query sees, 0 for all. ``cut``: whether the last block has tokens that the model
    does not read.
    """

    every: int
    entries: Any
    window: int
    cut: bool


def blocks_of(item: SitePlan, effects: Effects) -> PoolBlocks | None:
    """Return the blocks that a site's attention can read in place; None if its tokens must be gathered."""
    site, attention = item.site, item.site.attention
    table, other = site.key.block_table, site.value.block_table
    if table is None or other is None or not same(table.tokens, other.tokens) or not alike(table.places, other.places, effects):
        return None
    asks_more = item.extra_key is not None or site.assembly is not None or site.value.tiles > 1 or item.certify is not None
    if asks_more or attention.gives_log_sums or attention.beside is not None or attention.memory is not None:
        return None
    if any(part.scheme.attention != Scheme.attention for part in item.parts):
        return None
    alone = same(size_along(attention.q, attention.q_roles, "S", attention.folded), 1)
    every, window = tokens_together(table.places), window_of(site.bounds, effects)
    if not alone or every < LEAST or window is None:
        return None
    if same(table.tokens % every, 0):
        return PoolBlocks(every, table.tokens // every, window, False)
    # A window is counted from the limit as the model has it, and a limit that is clamped is another.
    return PoolBlocks(every, -(-table.tokens // every), 0, True) if isinstance(table.tokens, int) and not window else None


def alike(places: Places, other: Places, effects: Effects) -> bool:
    """Return whether two gathers read the same slots: by the same index tensors, or by tensors with the same computation."""
    def without(item: Places) -> Places:
        return dataclasses.replace(item, picked=tuple(dataclasses.replace(picked, node=places.picked[0].node) for picked in item.picked))

    if not places.picked or without(places) != without(other):
        return False
    return all(_equal(one.node, two.node, effects) for one, two in zip(places.picked, other.picked, strict=True))


def _equal(one: object, two: object, effects: Effects) -> bool:
    """Return whether two operands surely have equal values: one node, or equal operations on equal operands, none of them written to."""
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(_equal(*pair, effects) for pair in zip(one, two, strict=True))
    if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
        return type(one) is type(two) and one == two
    if effects.writes_to(one) or effects.writes_to(two):
        return False
    if one is two:
        return True
    target = one.target
    if not isinstance(target, OpOverload) or target is not two.target or target._schema.is_mutable:
        return False
    # Operators of others may keep a state, and empty memory holds anything.
    known = target.namespace in {"aten", "prims"} and "empty" not in str(target)
    if not known or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return one.kwargs == two.kwargs and _equal(one.args, two.args, effects)


def tokens_together(places: Places) -> int:
    """Return how many consecutive tokens of a row always lie in consecutive slots that begin at a multiple of their number.

    At most PAGE; 1 if no larger number is known.
    """
    if any({"T", "O"} & set("".join(item.roles)) for item in places.picked):
        return 1
    along = [run for run in places.running if run.role == "T"]
    if len(along) != 1 or along[0].weight != 1:
        return 1
    steps = [run.weight for run in places.running if run.role != "T"] + [item.weight for item in places.picked]
    spans = [item.every for item in places.picked if "N" in "".join(item.roles)]
    return math.gcd(PAGE, along[0].size, places.first, *steps, *spans)


def window_of(bounds: Bounds, effects: Effects) -> int | None:
    """Return the number of tokens up to its upper limit that a query sees, 0 for all; None if its mask is not made of such limits."""
    hi, lo = bounds.hi, bounds.lo
    if bounds.keep is not None or bounds.carried:
        return None
    if lo is None:
        return 0
    (one, last), (two, first) = ((None, limit.offset) if limit.node is None else _origin(limit.node, limit.offset) for limit in (hi, lo))
    alike = hi.kind is lo.kind and hi.amount == lo.amount and one is two and (one is None or not effects.writes_to(one))
    return last - first + 1 if alike and last >= first else None


def _origin(node: fx.Node, offset: int) -> tuple[fx.Node, int]:
    """Return (tensor, offset): the tensor that a limit of one token per row adds constants to, and the sum of these constants."""
    while node.args and is_tensor(source := node.args[0]):
        constant = node.args[1] if len(node.args) == 2 else None
        if op_name(node) in {"add", "sub"} and type(constant) is int and not node.kwargs:
            offset += constant if op_name(node) == "add" else -constant
        elif op_name(node) not in PULLBACKS or len(rows := _rows(node)) > 1 or list(map(str, rows)) != list(map(str, _rows(source))):
            break
        node = source
    return node, offset


def _rows(node: fx.Node) -> list[Any]:
    """Return the sizes other than 1 of a tensor; a view with one such dim has its values in the same order."""
    return [size for size in value_of(node).shape if not same(size, 1)]
