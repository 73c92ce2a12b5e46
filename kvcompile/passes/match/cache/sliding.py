"""Sliding windows: caches that keep only their newest tokens, in every spelling.

Two sequences of spans (``token_spans``) decide: the tokens that attention reads, and the tokens that the cache tensor, or the tensor that
is returned in its place, holds at the end of the graph. Both must be the last tokens of one sequence, some of the past and the new ones.

    buffer      cat and copy back, roll and a write at the end, all of the new tokens copied over the old ones
    returned    a slice of the concatenation, or a rolled copy, becomes the next cache

::

    line = cat([slice(cache, 2, 1), k], 2)      a window of 64 tokens, one new one
    copy_(cache, line)
    out  = scaled_dot_product_attention(q, line, ...)
    after:
    append(k, planes, kv_cursor_64, "int8")      over the oldest token, in its slot: nothing moves
    out  = attend(q, planes, ..., hi=63)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from kvcompile.passes.graph.effects import Effects, same_memory, written_arguments
from kvcompile.passes.graph.operators import CONCATENATIONS, SIZES, UPDATES, VIEWS
from kvcompile.passes.graph.pullback import Trail, trace
from kvcompile.passes.graph.shapes import (
    at_most,
    bind,
    fixed_by_guard,
    hint,
    is_tensor,
    negative,
    op_name,
    operand,
    plain,
    same,
    sizes,
    value_of,
)
from kvcompile.passes.match.cache.token_spans import SpanTracer, TokenSpan, Unknown
from kvcompile.passes.match.sites import Miss, Position, SlidingCache, Slot, Write
from kvcompile.passes.match.slot_kinds import SlotKind

ADVICE = "keep the last tokens of torch.cat([past, new]), and attend to all of it or to its last tokens"


@dataclass(frozen=True)
class Window:
    """A sliding window that an attention reads: all of its slot but the layout of heads and channels."""

    kind: SlotKind
    root: fx.Node
    placeholder: fx.Node | None
    outputs: tuple[int, ...]
    write: Write
    sliding: SlidingCache
    trail: Trail


def find(trail: Trail, roles: tuple[str, ...], operand: fx.Node, attention: fx.Node, effects: Effects) -> Window | None:
    """Return the sliding window that an operand traced to ``trail`` reads; None for other caches.

    Raises Miss for a sliding window that is read or kept in a way that is not supported.
    """
    if "T" not in roles or op_name(trail.base) in UPDATES:
        return None
    token = roles.index("T")
    for dim in range(trail.there.shape[1]):
        shift = trail.there[:, dim] - trail.here[:, token]
        if sizes(trail.base)[dim] > 1 and (shift == shift[0]).all():
            found = _read(trail, dim, int(shift[0]), operand, token, attention, effects)
            if found is not None:
                return found
    return None if trail.base.op == "placeholder" or op_name(trail.base) in CONCATENATIONS else _refill(operand, trail, effects)


def _read(trail: Trail, dim: int, shift: int, read_by: fx.Node, token: int, attention: fx.Node, effects: Effects) -> Window | None:
    """Return the sliding window along ``dim`` of a trail's end, read from index ``shift`` on; None for other caches.

    Raises Miss where attention reads other tokens than the newest, or a past that is not the one kept.
    """
    root = trail.base
    tracer = SpanTracer(effects, dim)
    try:
        read = tracer.of(root, effects.order[attention])
    except Unknown:
        return None
    past, new = _halves(read)
    if new is None:
        return None
    placeholder = past.source if past is not None else None
    kept, outputs = _kept(placeholder, new, dim, effects)
    if kept is None:
        return None
    total = value_of(root).shape[dim]
    count = value_of(read_by).shape[token]
    whole = shift == 0 and same(count, total)
    if not whole and not (shift and hint(total) - hint(count) == shift and _suffixes(trail.path)):
        raise Miss("attention reads other tokens than the last ones of the window", read_by, advice=ADVICE)
    in_place = placeholder is not None and bool(effects.writes.get(placeholder))
    if in_place and not any(op_name(node) in CONCATENATIONS | {"roll"} for node in kept.chain):
        # A write into a buffer that moves no token: no sliding window.
        return None
    if not in_place and whole and same(kept.size, total) and not kept.caps and (past is None or same(past.start, 0)):
        # Everything is kept: an ordinary cache that grows.
        return None
    size = value_of(new.source).shape[dim - value_of(root).dim() + value_of(new.source).dim()]
    _check_covers(read, size, root)
    _check_covers(kept.runs, size, root)
    _unchanged(new.source, effects)
    old = kept.runs[0] if len(kept.runs) == 2 else None
    if past is not None and old is not None and not same(past.end, old.end):
        raise Miss("attention and the kept window see different parts of the past", root, advice=ADVICE)
    # The comparison adds a guard: a call with more tokens than the window holds gets another graph.
    if not (hint(size) <= hint(count) and bool(size <= count)):
        raise Miss("attention reads only part of the new tokens", read_by, advice=ADVICE)
    if in_place and placeholder is not None:
        # A buffer has one length in all calls, so its size is fixed even where Dynamo made it symbolic.
        fixed_by_guard(value_of(placeholder).shape[dim])
    seen, keep = plain(count - size), plain(kept.size)
    cap = min((cap for cap in kept.caps if at_most(keep, cap)), default=None)
    grows = not in_place and whole and (past is None or same(past.start, 0))
    slots = _slots(in_place, placeholder, dim, seen, keep, cap, size, grows)
    lined = past if past is not None else old
    end = plain(lined.end) if lined is not None else None
    chain = tuple(sorted(tracer.chain | kept.chain, key=effects.order.__getitem__))
    sliding = SlidingCache(slots, seen, keep, end, chain)
    if in_place:
        kind, root = SlotKind.BUFFER, placeholder  # type: ignore[assignment]
    else:
        kind = SlotKind.CREATED_CONCAT if placeholder is None else SlotKind.CONCAT
    write = _write(new.source, dim, root, chain, effects)
    moved = trail.there.copy()
    moved[:, dim] -= shift
    return Window(kind, root, placeholder, outputs, write, sliding, replace(trail, there=moved))


@dataclass(frozen=True)
class RetainedTokens:
    """The tokens that stay for the next call: their spans (``runs``), their number (``size``), and the nodes on their way.

    ``caps``: token counts n of the slices ``[-n:]`` on their way.
    """

    runs: tuple[TokenSpan, ...]
    size: Any
    chain: frozenset[fx.Node]
    caps: frozenset[int]


def _suffixes(path: tuple[fx.Node, ...]) -> bool:
    """Return whether all slices on a path take the last elements of the dim that they cut, whatever its size is."""
    for node in path:
        if op_name(node) in {"slice", "narrow"}:
            arguments, parent = bind(node), operand(node)
            dim = int(arguments["dim"]) % len(sizes(node))
            total, count, given = value_of(parent).shape[dim], value_of(node).shape[dim], arguments.get("start") or 0
            start = value_of(given) if isinstance(given, fx.Node) else given
            start = start + total if negative(start) else start
            if not same(count, total) and not same(start + count, total):
                return False
    return True


def _halves(line: tuple[TokenSpan, ...]) -> tuple[TokenSpan | None, TokenSpan | None]:
    """Return (span of the past or None, span of the new tokens) of a sequence of only these; (None, None) for any other sequence."""
    if not line or len(line) > 2 or line[-1].source.op == "placeholder":
        return None, None
    if len(line) == 2 and line[0].source.op != "placeholder":
        return None, None
    return (line[0] if len(line) == 2 else None), line[-1]


def _kept(placeholder: fx.Node | None, new: TokenSpan, dim: int, effects: Effects) -> tuple[RetainedTokens | None, tuple[int, ...]]:
    """Return (the tokens that stay for the next call, the indices of the results that hold them); (None, ()) where none stay.

    They are in the past's buffer if that is written, else in a returned tensor. Raises Miss.
    """
    end = len(effects.order)
    if placeholder is not None and effects.writes.get(placeholder):
        kept = _traced(placeholder, dim, end, effects)
        if kept is None or kept.runs[-1].source is not new.source:
            raise Miss("what is written back into the window is not what attention reads", placeholder, advice=ADVICE)
        if _halves(kept.runs)[1] is None or (len(kept.runs) == 2 and kept.runs[0].source is not placeholder):
            raise Miss("what is written back into the window is not the newest tokens in order", placeholder, advice=ADVICE)
        return kept, ()
    found: dict[int, RetainedTokens] = {}
    returned = effects.output.args[0]
    for index, item in enumerate(returned if isinstance(returned, (list, tuple)) else [returned]):
        if not is_tensor(item) or len(sizes(item)) <= dim or not _related(item, {placeholder, new.source}, effects):
            continue
        kept = _traced(item, dim, end, effects)
        if kept is None or all(run.source not in {new.source, placeholder} for run in kept.runs):
            continue
        if _halves(kept.runs)[1] is None or kept.runs[-1].source is not new.source:
            raise Miss("what is returned as the next cache is not the newest tokens in order", item, advice=ADVICE)
        found[index] = kept
    if not found:
        return None, ()
    first = next(iter(found.values()))
    if any(not same(first.size, other.size) for other in found.values()):
        raise Miss("several windows of one cache are returned", *[effects.output], advice=ADVICE)
    return first, tuple(found)


def _related(item: fx.Node, sources: set[fx.Node | None], effects: Effects) -> bool:
    """Return whether an output is computed from one of ``sources`` in one operation, and is not itself one of them."""
    base = effects.root.get(item, item)
    made = {effects.root.get(node, node) for node in base.all_input_nodes} | set(base.all_input_nodes)
    return base not in sources and bool(made & sources)


def _traced(node: fx.Node, dim: int, time: int, effects: Effects) -> RetainedTokens | None:
    tracer = SpanTracer(effects, dim)
    try:
        runs = tracer.of(node, time)
    except Unknown:
        return None
    return RetainedTokens(runs, value_of(node).shape[dim], frozenset(tracer.chain), frozenset(tracer.caps)) if runs else None


def _check_covers(line: tuple[TokenSpan, ...], size: Any, root: fx.Node) -> None:
    """Raise Miss unless a sequence of spans ends with the newest token and, if it begins with the past, holds all new tokens."""
    if not same(line[-1].end, size):
        raise Miss("the window does not end with the newest token", root, advice=ADVICE)
    if len(line) == 2 and not same(line[-1].start if line[-1].base is None else line[-1].base, 0):
        raise Miss("the window leaves out some of the new tokens", root, advice=ADVICE)


def _unchanged(values: fx.Node, effects: Effects) -> None:
    """Raise Miss if the new tokens ``values`` are written to in place after they were computed."""
    for items in effects.writes.values():
        for write in items:
            late = effects.order[write] > effects.order[values]
            if late and any(same_memory(target, values) for target in written_arguments(write)):
                raise Miss("the new tokens are written to while the window is made", write)


def _slots(
    in_place: bool, placeholder: fx.Node | None, dim: int, seen: Any, keep: Any, cap: int | None, size: Any, grows: bool
) -> int:
    """Return how many slots a store needs to hold the tokens that a step reads and the tokens that it keeps.

    The number is the same in every graph of one cache. Raises Miss unless it is a constant.
    """
    room = plain(value_of(placeholder).shape[dim]) if in_place and placeholder is not None else None
    most = room if room is not None else cap if cap is not None else keep
    if not isinstance(most, int):
        raise Miss("how many tokens the window keeps is no constant", *([placeholder] if placeholder is not None else []), advice=ADVICE)
    if isinstance(seen, int) and not grows:
        return max(most, seen + 1)
    if in_place:
        return most + (1 if isinstance(size, int) and size == 1 else 0)
    # The next call reads all tokens that stay, and its new one.
    return most + 1


def _write(values: fx.Node, dim: int, root: fx.Node, chain: tuple[fx.Node, ...], effects: Effects) -> Write:
    """Return the write of all new tokens of a sliding window; in the rewritten graph it comes before the first node that reads them."""
    anchor = min(values.users, key=effects.order.__getitem__)
    rank = len(sizes(root))
    steps = dict.fromkeys(op_name(node) for node in chain if op_name(node) in CONCATENATIONS | {"roll", "copy_"})
    idiom = "window: " + " + ".join(steps)
    return Write(
        idiom, chain[-1], root, values, tuple(range(rank)), dim, Position(), value_of(values).shape[dim - rank], anchor=anchor,
    )


def _refill(operand: fx.Node, trail: Trail, effects: Effects) -> Window | None:
    """Return the window of an attention that reads only new tokens, the last of which replace all of a buffer; None for other attentions.

    Raises Miss if the new tokens do not fill the buffer in a supported way.
    """
    sources = frozenset({*trail.path, trail.base})
    for root, writes in effects.writes.items():
        if same_memory(root, trail.base) or not any(op_name(write) == "copy_" for write in writes):
            continue
        if root.op != "placeholder" and not effects.outputs_of(effects.family(root)):
            continue
        for dim in range(len(sizes(root))):
            tracer = SpanTracer(effects, dim, sources)
            try:
                kept = tracer.of(root, len(effects.order))
            except Unknown:
                continue
            if len(kept) != 1 or kept[0].source not in sources or not tracer.chain:
                continue
            values = kept[0].source
            if value_of(values).dim() != value_of(root).dim() or not all(
                have == want for at, (have, want) in enumerate(zip(sizes(values), sizes(root), strict=True)) if at != dim
            ):
                continue
            size = value_of(values).shape[dim]
            _check_covers(kept, size, root)
            _unchanged(values, effects)
            if not same(kept[0].count, value_of(root).shape[dim]):
                raise Miss("how many tokens the window keeps is no constant", root, advice=ADVICE)
            room = fixed_by_guard(value_of(root).shape[dim])
            chain = tuple(sorted(tracer.chain, key=effects.order.__getitem__))
            sliding = SlidingCache(room, 0, room, None, chain)
            kind = SlotKind.BUFFER if root.op == "placeholder" else SlotKind.CREATED_BUFFER
            outputs = () if root.op == "placeholder" else effects.outputs_of(effects.family(root))
            again = trace(operand, lambda node, stop=values: node is stop, scales=True)  # type: ignore[misc]
            return Window(
                kind, root, root if root.op == "placeholder" else None, outputs, _write(values, dim, root, chain, effects), sliding, again,
            )
    return None


def strangers(slots: list[Slot], allowed: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes outside of ``allowed`` that read a cache of ``slots``, its window, or a node on the way between the two.

    Reads through views count. Reads of sizes, and of the new tokens before they are joined to the window, do not.
    """
    inside = {node for slot in slots if slot.sliding is not None for node in (*slot.sliding.chain, *slot.path)}
    inside |= {slot.root for slot in slots}
    inside |= {slot.placeholder for slot in slots if slot.placeholder is not None}
    # The model may read the new tokens themselves.
    values = {slot.write.values for slot in slots}
    found: list[fx.Node] = []
    stack = list(inside - values)
    seen = set(stack)
    while stack:
        for user in stack.pop().users:
            if user in inside or user in allowed or op_name(user) in SIZES or user in seen:
                continue
            seen.add(user)
            if op_name(user) in VIEWS:
                stack.append(user)
            else:
                found.append(user)
    return found
