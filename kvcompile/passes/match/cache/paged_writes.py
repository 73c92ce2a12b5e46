"""Writes to paged caches: the slot mapping of the written tokens, and the role of every dim of the written values."""

from __future__ import annotations

import functools
import math
import string
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from kvcompile.passes.graph.effects import same_memory
from kvcompile.passes.graph.operators import IN_PLACE
from kvcompile.passes.graph.pullback import Coords, broadcast, sample, trace
from kvcompile.passes.graph.shapes import bind, equal, hint, is_tensor, op_name, same, sizes, value_of
from kvcompile.passes.match.cache.gathers import Indexed, counted, indexed, integer_indices
from kvcompile.passes.match.cache.paged_views import follow, linear
from kvcompile.passes.match.paged_places import Picked, Places, Running
from kvcompile.passes.match.sites import Axes, Miss, Position, Write

FORMS = "write new tokens with pool[blocks, offsets] = x, pool.view(-1, K, D)[slots] = x or index_copy_(0, slots, x)"
OTHER_ORDER = "the write goes through a view whose slots are in another order than the cache's"


def pool_write(node: fx.Node, root: fx.Node, axes: Axes, heads: int) -> Write | None:
    """Return the write of an in-place node to a paged cache, None where it writes another part; raises Miss for an unknown write."""
    name = op_name(node)
    if name not in IN_PLACE or name == "copy_":
        raise Miss(f"the pool that attention gathers from is written by {name}, which is no known way to write slots", node, advice=FORMS)
    arguments = bind(node)
    if arguments.get("accumulate"):
        raise Miss("the write accumulates into the cache", node, advice="write the new tokens, without accumulate=True")
    dest = arguments["self"]
    rank = len(sizes(dest))
    wraps = "indices" in arguments
    values = next((arguments[name] for name in ("values", "source", "src") if name in arguments), None)
    if wraps:
        given = arguments["indices"]
    else:
        dim, index = int(arguments["dim"]) % rank, arguments["index"]
        given = [None] * dim + [index if name == "index_copy_" else _scattered(node, dest, index, values, dim)]
        if not sizes(index):
            raise Miss("the write's index has no dims", node, advice="give it one: pos.reshape(1)")
    indices = integer_indices(given, rank)
    if indices is None or not is_tensor(values):
        raise Miss("the write's indices are no integer tensors", node, advice="index with integer positions, not with a mask")
    return _Form(node, root, dest, values, indices, wraps, axes, heads).write()


def _scattered(node: fx.Node, dest: fx.Node, index: fx.Node, values: fx.Node | None, dim: int) -> fx.Node:
    """Return the positions [n] along ``dim`` that a scatter's index broadcasts; raises Miss for any other index."""
    if bind(node).get("reduce") or not is_tensor(values):
        raise Miss("a scatter that reduces, or writes one number", node, advice=FORMS)
    whole = all(have == want for at, (have, want) in enumerate(zip(sizes(index), sizes(dest), strict=True)) if at != dim)
    trail = trace(index, lambda item: len(sizes(item)) == 1)
    alone = sizes(trail.base) == (sizes(index)[dim],) and bool((trail.there[:, 0] == trail.here[:, dim]).all())
    if not whole or sizes(index) != sizes(values) or not alone or not same_memory(trail.base, index):
        raise Miss("a scatter whose index is no broadcast of one position a token", index, advice=FORMS)
    return trail.base


@dataclass(frozen=True)
class _Form:
    """One write to ``dest``, a view of the paged cache ``root``: the operands from which ``write`` reads its slot mapping."""

    node: fx.Node
    root: fx.Node
    dest: fx.Node
    values: fx.Node
    indices: dict[int, fx.Node]
    wraps: bool
    axes: Axes
    heads: int

    @functools.cached_property
    def form(self) -> Indexed:
        """The layout of the written part."""
        return indexed(len(sizes(self.dest)), self.indices)

    @functools.cached_property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes of the written part, ints or SymInts."""
        full = value_of(self.dest).shape
        return tuple(full[dim] if dim is not None else self._along(at - self.form.first) for at, dim in enumerate(self.form.dims))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the written part as plain ints."""
        return tuple(hint(size) for size in self.sizes)

    def _along(self, dim: int) -> Any:
        """Return the size of a dim of the broadcast index tensors, a SymInt where it is symbolic."""
        behind = len(self.form.shape) - dim
        for index in self.indices.values():
            shape = value_of(index).shape
            if len(shape) >= behind and hint(shape[-behind]) == self.form.shape[dim]:
                return shape[-behind]
        return self.form.shape[dim]

    def write(self) -> Write | None:
        """Return the write, None where it goes to another part of the tensor.

        Raises Miss where it cannot be followed or indexes heads or channels.
        """
        here = sample(self.shape)
        rng = np.random.default_rng(1)
        dest_shape = sizes(self.dest)
        columns = {dim: here[:, at] for at, dim in enumerate(self.form.dims) if dim is not None}
        block = here[:, self.form.first : self.form.first + len(self.form.shape)]
        running = {dim: values for dim, index in self.indices.items() if (values := counted(index, broadcast(index, block))) is not None}
        columns |= {dim: running.get(dim, rng.integers(0, max(dest_shape[dim], 1), len(here))) for dim in self.indices}
        reached = follow(self.dest, np.stack([columns[dim] for dim in range(len(dest_shape))], axis=1), self.root)
        if reached is None:
            raise Miss("the write goes through a view that cannot be followed to the cache tensor", self.dest, advice=FORMS)
        there = reached[0]
        form = linear(self.dest, self.root, self.axes, OTHER_ORDER)
        constant = {dim: int(there[0, dim]) for dim, _ in self.axes.select if (there[:, dim] == there[0, dim]).all()}
        if any(constant.get(dim, wanted) != wanted for dim, wanted in self.axes.select):
            return None
        dims, select = self._dims(here, there, form.weights)
        if {dim for dim, _ in self.axes.select} - constant.keys() - {dim for dim, _ in select.values()}:
            raise Miss("the write chooses a part of the cache by a tensor", self.node, advice="choose the layer by a number")
        picked = tuple(
            Picked(index, self._roles(index, dims), form.weights[dim], dest_shape[dim], self.wraps) for dim, index in self.indices.items()
            if form.weights[dim] or (dest_shape[dim] > 1 and dim not in running)
        )
        if any(not item.weight or not {*item.roles} <= {*string.ascii_lowercase, ""} for item in picked):
            raise Miss("the write indexes heads or channels of the cache", self.node, advice=FORMS)
        along = tuple(
            Running(dims[at], form.weights[dim], dest_shape[dim]) for at, dim in enumerate(self.form.dims)
            if dim is not None and form.weights[dim] and dims[at]
        )
        self._fix_sizes()
        places = Places(picked, along, form.first, dims, tuple(sorted((at, index) for at, (_, index) in select.items())), self.sizes)
        count = math.prod(size for size, role in zip(self.sizes, dims, strict=True) if role in places.along)
        idiom = f"{op_name(self.node)} by place"
        return Write(idiom, self.node, self.root, self.values, (), self.axes.token_dim, Position(), count, places=places)

    def _fix_sizes(self) -> None:
        """Add guards that values and indices have the sizes of the written block: every valid call has, but symbols may differ.

        Torch compares them no sooner than their codes are written, in a graph whose guards may be complete by then.
        """
        block = self.sizes[self.form.first : self.form.first + len(self.form.shape)]
        given = [(value_of(index).shape, block) for index in self.indices.values()] + [(value_of(self.values).shape, self.sizes)]
        for have, want in ((have, want) for shape, wanted in given for have, want in zip(shape[::-1], wanted[::-1], strict=False)):
            if not same(have, 1) and not same(want, 1):
                equal(have, want)

    def _roles(self, index: fx.Node, dims: tuple[str, ...]) -> tuple[str, ...]:
        """Return the letters of an index tensor's dims, which align right with the dims of the broadcast indices."""
        block = dims[self.form.first : self.form.first + len(self.form.shape)]
        mine = block[len(block) - len(sizes(index)) :]
        return tuple(role if size > 1 else "" for role, size in zip(mine, sizes(index), strict=True))

    def _dims(self, here: Coords, there: Coords, weights: tuple[int, ...]) -> tuple[tuple[str, ...], dict[int, tuple[int, int]]]:
        """Return (the role of every written dim, {written dim: (root dim, index)} for dims at a selected index of the root).

        The dims of the second result have size one. Raises Miss if the write covers only some heads or channels.
        """
        head, channel, channels = self._columns(there)
        chosen = dict(self.axes.select)
        roles: list[str] = []
        select: dict[int, tuple[int, int]] = {}
        letters = iter(string.ascii_lowercase)
        for at, size in enumerate(self.shape):
            column, source = here[:, at], self.form.dims[at]
            if size == 1:
                roles.append("")
            elif "K" not in roles and size == self.heads and (column == head).all():
                roles.append("K")
            elif source is None or weights[source]:
                roles.append(next(letters))
            elif size == channels and (column == channel).all():
                roles.append("D")
            elif size == self.heads * channels and (column == head * channels + channel).all():
                roles.append("KD")
            elif found := [dim for dim in chosen if (there[:, dim] == column).all()]:
                roles.append("")
                select[at] = (found[0], chosen[found[0]])
            else:
                raise Miss("the write goes through a view that mixes the cache's dims", self.dest, advice=FORMS)
        named = "".join(roles)
        if ("K" not in named and self.heads > 1) or ("D" not in named and channels > 1):
            raise Miss("the write covers only part of the cache's heads or channels", self.node, advice="write all of them at once")
        return tuple(roles), select

    def _columns(self, there: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the head and the channel of every sampled element, and the number of channels."""
        shape, labels = sizes(self.root), self.axes.labels
        zero = np.zeros(len(there), dtype=np.int64)
        if ("K", "D") in labels:
            dim = labels.index(("K", "D"))
            channels = shape[dim] // self.heads
            return there[:, dim] // channels, there[:, dim] % channels, channels
        head = there[:, labels.index(("K",))] if ("K",) in labels else zero
        if ("D",) not in labels:
            return head, zero, 1
        dim = labels.index(("D",))
        return head, there[:, dim], shape[dim]
