"""Pairs: whether the key and value slots of one attention, or the slots of its latent, agree with each other and with its heads."""

from __future__ import annotations

from dataclasses import replace

from kvcompile.passes.graph.shapes import equal, hint, sizes
from kvcompile.passes.match.cache.first_rows import same_rows
from kvcompile.passes.match.sites import Assembly, Attention, Axes, Miss, SlidingCache, Slot


def query_heads(attention: Attention, batch: int) -> int:
    """Return the number of query heads, from the sizes and roles of the query operand."""
    shape = sizes(attention.q)
    count = attention.folded
    for role, size in zip(attention.q_roles, shape, strict=True):
        if role and not set(role) - set("BHKG"):
            count *= size // batch if "B" in role and len(role) > 1 else size if role != "B" else 1
    return count


def with_tiles(key: Slot, value: Slot, heads: int) -> Slot:
    """Return the value slot, with ``tiles`` set if it has fewer heads than the keys: key head k goes with value head k % value.heads."""
    tiles, rest = divmod(key.heads, value.heads)
    plain = key.tiles == 1 and not key.tiled and not rest and tiles > 1
    # Without groups the tiled values are tiles alone; a single head is the same in every order.
    if plain and (value.tiles == tiles or (value.tiled and heads == key.heads) or (value.heads == 1 and value.tiles == 1)):
        return replace(value, tiled=False, tiles=tiles)
    return value


def _check_tiles(attention: Attention, key: Slot, value: Slot) -> None:
    """Raise Miss where heads are tiled in different orders, or tiled over learned tokens, a sliding window or a paged cache."""
    if key.tiles == value.tiles == 1:
        return
    if key.tiles > 1 or key.heads != value.heads * value.tiles:
        raise Miss(
            "the heads of keys and values are repeated in different orders", key.root, value.root,
            advice="repeat both with repeat_interleave, or both with repeat",
        )
    if attention.memory is not None or key.sliding is not None or key.block_table is not None:
        raise Miss(
            "values of fewer heads than the keys are read together with learned tokens, from a sliding window or from a pool", value.root,
            advice="cache as many heads of values as of keys",
        )


def check_pair(attention: Attention, key: Slot, value: Slot) -> tuple[int, int]:
    """Return (query heads, query heads per kv head) of a site; raise Miss where its key and value slots do not agree."""
    if key.kind.facts.written != value.kind.facts.written:
        unwritten = value if key.kind.facts.written else key
        what = "keys" if unwritten is key else "values"
        raise Miss(
            f"the cache of the {what} is read but not written in this graph, the other one is", unwritten.root,
            advice="write keys and values in the same compiled call",
        )
    if key.kind is not value.kind:
        raise Miss("keys and values are cached in different ways", key.root, value.root, advice="write both in the same way")
    _check_tiles(attention, key, value)
    if key.heads != value.heads * value.tiles or not equal(key.batch, value.batch):
        raise Miss(
            "the key and the value cache have different heads or batch sizes", key.root, value.root, advice="give both the same heads",
        )
    if not same_rows(key, value):
        raise Miss(
            "the key and the value cache are written in different rows", key.root, value.root, advice="write the same rows of both",
        )
    if key.root is value.root and _overlap(key.axes, value.axes):
        raise Miss("keys and values are the same cache entries", key.root, advice="cache keys and values apart")
    heads = query_heads(attention, hint(key.batch))
    if heads % key.heads:
        raise Miss(f"{heads} query heads over {key.heads} kv heads", attention.output, advice="use a multiple of the kv heads")
    if key.tiled != value.tiled:
        raise Miss(
            "the heads of keys and values are repeated in different orders", key.root, value.root,
            advice="repeat both with repeat_interleave, or both with repeat",
        )
    if not equal(key.capacity, value.capacity) or not _alike(key.sliding, value.sliding):
        raise Miss(
            "the key and the value cache hold different numbers of tokens", key.root, value.root, advice="give both the same capacity",
        )
    return heads, heads // key.heads


def _overlap(key: Axes, value: Axes) -> bool:
    """Return whether two parts of one cache tensor have entries in common."""
    places = [(dict(axes.select), dict(axes.counts)) for axes in (key, value)]
    (one, some), (other, more) = places
    apart = [
        one[dim] + some.get(dim, 1) <= other[dim] or other[dim] + more.get(dim, 1) <= one[dim] for dim in one if dim in other
    ]
    return not any(apart)


def _alike(key: SlidingCache | None, value: SlidingCache | None) -> bool:
    """Return whether the key and the value cache slide in the same way; None is a cache that does not slide."""
    if key is None or value is None:
        return key is value
    return key.slots == value.slots and all(
        equal(0 if a is None else a, 0 if b is None else b)
        for a, b in ((key.past, value.past), (key.keep, value.keep), (key.end, value.end))
    )


def check_assembly(attention: Attention, assembly: Assembly) -> tuple[int, int]:
    """Return (query heads, query heads per kv head in the operands) of an attention over a latent's ``Assembly``.

    Raises Miss where its slots differ in kind, batch size or length, or the number of query heads is not a multiple of the kv heads.
    """
    found = [slot for slot in assembly.slots if slot is not None]
    for fact, of in (
        ("cached in different ways", lambda slot: slot.kind), ("caches of different batch sizes", lambda slot: hint(slot.batch)),
        ("caches of different lengths", lambda slot: hint(slot.capacity)),
    ):
        if len({of(slot) for slot in found}) > 1:
            raise Miss(
                f"the parts that keys and values are made from are {fact}", *[slot.root for slot in found],
                advice="cache all parts alike, or in one tensor",
            )
    heads = query_heads(attention, hint(found[0].batch))
    if heads % assembly.heads:
        raise Miss(f"{heads} query heads over {assembly.heads} kv heads", attention.output, advice="use a multiple of the kv heads")
    named = dict(zip(attention.q_roles, sizes(attention.q), strict=True))
    kept = dict(zip(attention.k_roles, sizes(attention.k), strict=True))
    if attention.folded > 1:
        return heads, attention.folded
    return heads, named["G"] if "G" in named else heads // kept["K"] if "K" in kept else 1
