"""From an attention operand back to the cache slot it reads: root tensor, layout, write.

The operand's sampled coordinates arrive at the root; which root dim carries which role is read off them.
Nothing is assumed about the order of the dims, about a combined K/V tensor or about how heads repeat.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import fx

from kvcompile.passes import rings
from kvcompile.passes.effects import Effects, same_memory, written_arguments
from kvcompile.passes.patterns.writes import concatenation, in_place
from kvcompile.passes.pullback import Trail, factor, step, trace
from kvcompile.passes.shapes import is_tensor, op_name, sizes
from kvcompile.passes.sites import Axes, Miss, Position, Slot, SlotKind, Write

MAKERS = {"zeros", "new_zeros", "zeros_like", "full", "new_full", "full_like", "empty", "new_empty", "empty_like"}
PAIRS = (("K", "D"), ("B", "K"))
TILED = "tiled"
"""Marks a reading in which the query heads go round the kv heads."""


class NoCache(Exception):
    """The operand is no cache at all: an attention over fresh values, which nobody asked to compress."""


def _through_writes(node: fx.Node) -> Trail:
    """Trace to the root; the result of an in-place write is the tensor it wrote."""
    trail = trace(node, lambda found: bool(written_arguments(found)), scales=True)
    path = list(trail.path)
    while written_arguments(trail.base):
        target = written_arguments(trail.base)[0]
        path.append(trail.base)
        further = _resume(target, trail)
        path += further.path
        trail = Trail(further.base, further.there, trail.here, tuple(path))
    return Trail(trail.base, trail.there, trail.here, tuple(path))


def _resume(node: fx.Node, trail: Trail) -> Trail:
    """Go on tracing from ``node`` with the coordinates that ``trail`` arrived with."""
    coords, path = trail.there, []
    while not written_arguments(node):
        moved = step(node, coords, scales=True)
        if moved is None:
            break
        path.append(node)
        node, coords = moved
    return Trail(node, coords, trail.here, tuple(path))


def _columns(trail: Trail, roles: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[np.ndarray, int]]:
    """The sampled column and the size of each role of the operand; flattened BH is split later."""
    return {role: (trail.here[:, dim], shape[dim]) for dim, role in enumerate(roles) if role}


def _candidates(columns: dict[str, tuple[np.ndarray, int]], base: tuple[int, ...]) -> list[dict[str, tuple[np.ndarray, int]]]:
    """Every way to read batch and kv head off the operand's dims: H over all divisors, BH over all batch sizes."""
    rest = {role: value for role, value in columns.items() if role in {"T", "D", "B", "K"}}
    found = []
    if "BH" in columns:
        column, size = columns["BH"]
        for batch in sorted({n for n in (*base, 1) if size % n == 0}):
            heads = size // batch
            found += [
                {**rest, "B": (column // heads, batch), "K": (column % heads // (heads // kv), kv)}
                for kv in range(heads, 0, -1)
                if heads % kv == 0
            ]
        return found
    if "H" in columns:
        column, heads = columns["H"]
        none = (np.zeros_like(column), 1)
        counts = [kv for kv in range(heads, 0, -1) if heads % kv == 0]
        found = [{"B": none, **rest, "K": (column // (heads // kv), kv)} for kv in counts]
        return found + [{"B": none, **rest, "K": (column % kv, kv), TILED: none} for kv in counts if 1 < kv < heads]
    zero = np.zeros(len(next(iter(columns.values()))[0]), dtype=np.int64)
    return [{"B": (zero, 1), "K": (zero, 1), **rest}]


def _label(trail: Trail, base: tuple[int, ...], roles: dict[str, tuple[np.ndarray, int]], token_dim: int) -> Axes | None:
    """The labels of the root's dims under one reading of the operand's dims; None where they do not fit."""
    labels: list[tuple[str, ...] | None] = [None] * len(base)
    left = {role: value for role, value in roles.items() if role != TILED}
    token = left.pop("T")[0]
    if not (trail.there[:, token_dim] == token).all():
        return None
    labels[token_dim] = ("T",)
    select = []
    for dim, size in enumerate(base):
        if labels[dim] is not None or size == 1:
            continue
        column = trail.there[:, dim]
        singles = [role for role, (values, n) in left.items() if n == size and (values == column).all()]
        if singles:
            labels[dim] = (singles[0],)
            left.pop(singles[0])
            continue
        pairs = [
            (a, b) for a, b in PAIRS if a in left and b in left and left[a][1] * left[b][1] == size
            and (left[a][0] * left[b][1] + left[b][0] == column).all()
        ]
        if pairs:
            labels[dim] = pairs[0]
            left.pop(pairs[0][0]), left.pop(pairs[0][1])
            continue
        if (column == column[0]).all():
            labels[dim] = ()
            select.append((dim, int(column[0])))
            continue
        return None
    missing = [role for role in ("B", "K", "D") if role in left]
    if any(left[role][1] != 1 for role in missing):
        return None
    waiting = iter(missing)
    for dim in range(len(base)):
        if labels[dim] is None:
            role = next(waiting, None)
            labels[dim] = (role,) if role is not None else ()
            if role is None:
                select.append((dim, 0))
    # A role of size one that no dim stands for is still there, as nothing.
    return Axes(tuple(label or () for label in labels), tuple(select), TILED in roles)


def axes_of(trail: Trail, roles: tuple[str, ...], operand: fx.Node, token_dim: int) -> tuple[Axes, int]:
    """The root's layout and its number of kv heads; raises Miss where the operand is no plain view of the cache."""
    base = sizes(trail.base)
    columns = _columns(trail, roles, sizes(operand))
    for reading in _candidates(columns, base):
        axes = _label(trail, base, reading, token_dim)
        if axes is not None:
            return axes, reading["K"][1]
    raise Miss(
        "the operand is no plain view of the whole cache (heads in another order, part of the channels, or a range of tokens "
        "that does not start at the first)", operand, advice="read the cache from its first token, all channels, heads in order",
    )


def _find_write(root: fx.Node, trail: Trail, attention: fx.Node, effects: Effects) -> Write:
    """The one write into this part of the root; raises Miss where there is none, several, or one too late."""
    writes = effects.writes.get(root, ())
    hits = []
    for node in writes:
        write = in_place(node, root)
        fixed = dict(write.select)
        if all((trail.there[:, dim] == index).all() for dim, index in fixed.items()):
            hits.append(write)
    if not hits:
        raise Miss("no write goes to the part of the cache that attention reads", root)
    if len(hits) > 1:
        raise Miss(f"the cache is written {len(hits)} times before it is read", *[hit.node for hit in hits])
    write = hits[0]
    if not same_memory(written_arguments(write.node)[0], root):
        raise Miss("the write goes to a copy of the cache, which the caller never sees", write.node)
    if effects.order[write.node] > effects.order[attention]:
        raise Miss("the cache is written after the attention that reads it", write.node)
    for node in trail.path:
        early = effects.order[node] < effects.order[write.node]
        if early and is_tensor(node) and not same_memory(node, root):
            raise Miss("the attention reads a copy of the cache made before the write", node)
    return write


def find(operand: fx.Node, roles: tuple[str, ...], attention: fx.Node, effects: Effects) -> Slot:
    """The slot that an attention operand reads; raises Miss, or NoCache where there is no cache behind it."""
    trail = _through_writes(operand)
    root = trail.base
    window = rings.find(trail, roles, operand, attention, effects)
    if window is not None:
        axes, heads = axes_of(window.trail, roles, operand, window.write.token_dim)
        slot = _slot(window.kind, window.root, window.placeholder, window.outputs, axes, heads, window.write, window.trail)
        return replace(slot, ring=window.ring)
    if op_name(root) in {"cat", "concat", "concatenate"}:
        return _concatenated(root, trail, roles, operand, effects)
    if root.op == "placeholder" and not effects.writes.get(root):
        return _only_read(root, trail, roles, operand)
    if root.op == "placeholder":
        write = _find_write(root, trail, attention, effects)
        axes, heads = axes_of(trail, roles, operand, write.token_dim)
        return _slot(SlotKind.BUFFER, root, root, (), axes, heads, write, trail)
    if op_name(root) in MAKERS:
        write = _find_write(root, trail, attention, effects)
        outputs = effects.outputs_of(effects.family(root))
        if not outputs:
            raise NoCache
        axes, heads = axes_of(trail, roles, operand, write.token_dim)
        return _slot(SlotKind.BORN_BUFFER, root, None, outputs, axes, heads, write, trail)
    raise NoCache


def _only_read(root: fx.Node, trail: Trail, roles: tuple[str, ...], operand: fx.Node) -> Slot:
    """A cache that another call fills and this one reads, as the keys and values of what is attended across to."""
    tokens = trail.here[:, roles.index("T")]
    dims = [
        dim for dim, size in enumerate(sizes(root))
        if (trail.there[:, dim] == tokens).all() and size == sizes(operand)[roles.index("T")]
    ]
    if not dims:
        raise Miss(
            "the cache is only read in this graph, and not from its first token to its last", root,
            advice="write the tokens in the compiled call that attends to them, or read the whole cache",
        )
    write = Write("not written here", root, root, root, (), dims[0], Position(), 0)
    axes, heads = axes_of(trail, roles, operand, write.token_dim)
    return _slot(SlotKind.READ, root, root, (), axes, heads, write, trail)


def _concatenated(root: fx.Node, trail: Trail, roles: tuple[str, ...], operand: fx.Node, effects: Effects) -> Slot:
    past, write = concatenation(root)
    outputs = effects.outputs_of({node for node in effects.family(root) if sizes(node) == sizes(root)})
    if past is None:
        if not outputs:
            raise NoCache
        axes, heads = axes_of(trail, roles, operand, write.token_dim)
        return _slot(SlotKind.BORN_CONCAT, root, None, outputs, axes, heads, write, trail)
    origin = effects.root[past]
    if origin.op != "placeholder":
        raise NoCache
    if past is not origin:
        raise Miss("the past passes through other operations before it is concatenated", past)
    if not outputs:
        raise Miss(
            "the concatenated cache is not returned as it is (a window of it, or nothing, is kept)", root,
            advice="return the concatenated keys and values, or use a static cache",
        )
    axes, heads = axes_of(trail, roles, operand, write.token_dim)
    return _slot(SlotKind.CONCAT, root, origin, outputs, axes, heads, write, trail)


def _slot(
    kind: SlotKind, root: fx.Node, placeholder: fx.Node | None, outputs: tuple[int, ...], axes: Axes, heads: int,
    write: Write, trail: Trail,
) -> Slot:
    shape = sizes(root)
    size = {"B": 1, "K": heads}
    for dim, label in enumerate(axes.labels):
        if len(label) == 1:
            size[label[0]] = shape[dim]
        elif len(label) == 2:
            first, second = label
            known = size.get(first) if first == "K" else None
            size[second if known else first] = shape[dim] // (known or heads)
    return Slot(
        kind, root, placeholder, outputs, axes, write, trail.path, heads, size.get("D", 1), size["B"], size["T"], factor(trail.path)
    )
