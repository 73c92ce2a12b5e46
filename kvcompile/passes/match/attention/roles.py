"""Roles of a product's letters: which dim of queries times keys is the batch, the heads, the new tokens, the cached tokens.

The softmax shows the letter of the cached tokens. Letters of both operands are batch and heads; of the letters that only the queries have,
one is the new tokens and another one the query heads of a kv head. Where letters alone do not decide, every reading is a candidate, and the
caches, the write and the mask choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from kvcompile.passes.graph.shapes import sizes
from kvcompile.passes.match.attention.products import Product
from kvcompile.passes.match.sites import Miss

Dims = tuple[tuple[str, ...], ...]
"""The letters that each dim of a tensor holds: one, several where dims were flattened, none for a dim of size one."""


@dataclass
class Letters:
    """The letters of the scores with their sizes, followed through reshapes: a letter that a reshape splits becomes several."""

    size: dict[str, int] = field(default_factory=dict)
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def note(self, node: fx.Node, letters: Sequence[str]) -> Dims:
        """Record the sizes of a tensor's letters; return its dims."""
        for letter, size in zip(letters, sizes(node), strict=True):
            if letter:
                self.size[letter] = max(size, self.size.get(letter, 1))
        return tuple((letter,) if letter else () for letter in letters)

    def atoms(self, letter: str) -> tuple[str, ...]:
        """Return the letters that a letter was split into, or the letter itself."""
        parts = self.parts.get(letter)
        return tuple(atom for part in parts for atom in self.atoms(part)) if parts else (letter,)

    def split_dims(self, dims: Dims) -> Dims:
        """Return dims with every split letter replaced by its parts."""
        return tuple(tuple(atom for letter in dim for atom in self.atoms(letter)) for dim in dims)

    def reshaped(self, dims: Dims, before: tuple[int, ...], after: tuple[int, ...], node: fx.Node) -> Dims:
        """Return the dims after a reshape from sizes ``before`` to sizes ``after``; raises Miss where letters would be mixed."""
        dims = self.split_dims(dims)
        found: list[tuple[str, ...]] = []
        i = j = 0
        while i < len(before) or j < len(after):
            inside, outside = [i], [j]
            if i < len(before) and j < len(after) and before[i] == after[j]:
                found.append(dims[i])
                i, j = i + 1, j + 1
                continue
            if j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1) and not self._opens(dims, before, after, i, j):
                found.append(())
                j += 1
                continue
            if i < len(before) and before[i] == 1:
                i += 1
                continue
            if i >= len(before) or j >= len(after):
                raise _mixed(node)
            left, right = before[i], after[j]
            while left != right:
                if left < right:
                    i += 1
                    if i >= len(before):
                        raise _mixed(node)
                    inside.append(i)
                    left *= before[i]
                else:
                    j += 1
                    if j >= len(after):
                        raise _mixed(node)
                    outside.append(j)
                    right *= after[j]
            found += self._regrouped([dims[item] for item in inside], [after[item] for item in outside], node)
            i, j = i + 1, j + 1
        return tuple(found)

    def _opens(self, dims: Dims, before: tuple[int, ...], after: tuple[int, ...], i: int, j: int) -> bool:
        """Return whether a reshape puts the first letter of a flattened dim, if of size one, into a separate dim.

        The reshape maps sizes ``before``, of dims ``dims``, to sizes ``after``; ``i`` and ``j`` are the next dims to assign in each.
        """
        return i < len(before) and len(dims[i]) > 1 and self.size.get(dims[i][0]) == 1 and after[j + 1 : j + 2] == before[i : i + 1]

    def _regrouped(self, inside: list[tuple[str, ...]], after: list[int], node: fx.Node) -> list[tuple[str, ...]]:
        """Return the letters of the dims ``inside``, distributed over dims of sizes ``after``.

        A lone letter is split, and its parts and their sizes recorded. Raises Miss where letters would be mixed.
        """
        letters = [letter for dim in inside for letter in dim]
        if len(after) == 1:
            return [tuple(letters)]
        if len(letters) == 1:
            wide = [size for size in after if size != 1]
            if len(wide) == 1:
                return [tuple(letters) if size != 1 else () for size in after]
            made = tuple(f"{letters[0]}.{index}" for index in range(len(after)))
            self.parts[letters[0]] = made
            self.size.update(zip(made, after, strict=True))
            return [(name,) for name in made]
        rest = list(letters)
        found = []
        for size in after:
            dim: list[str] = []
            total = 1
            while rest and total * self.size[rest[0]] <= size and (total < size or self.size[rest[0]] == 1):
                total *= self.size[rest[0]]
                dim.append(rest.pop(0))
            if total != size:
                raise _mixed(node)
            found.append(tuple(dim))
        if rest:
            raise _mixed(node)
        return found


def _mixed(node: fx.Node) -> Miss:
    return Miss(
        "the scores or weights are reshaped in a way that mixes heads and tokens", node,
        advice="keep batch, heads, new tokens and cached tokens in dims of their own, or flatten whole dims",
    )


@dataclass(frozen=True)
class Naming:
    """An assignment of roles to a product's letters (einsum indices), one of several candidates."""

    names: dict[str, str]

    def roles(self, dims: Dims) -> tuple[str, ...]:
        """Return the role of every dim: several letters for a flattened dim, '' for a dim of size one."""
        return tuple("".join(self.names[letter] for letter in dim) for dim in dims)


def readings(product: Product, letters: Letters, tokens: str) -> tuple[int, Iterator[Naming]]:
    """Return (which operand is the keys, every way to name the letters, likeliest first); raises Miss for no product of queries and keys.

    ``tokens``: the letter that the softmax runs over.
    """
    keys = [index for index, (_, spelled) in enumerate(product.operands()) if tokens in spelled]
    if len(keys) != 1:
        raise Miss("the softmax runs over no dim of the keys alone", product.node, advice="take the softmax over the cached tokens")
    (_, q), (_, k) = product.operands()[1 - keys[0]], product.operands()[keys[0]]
    out = set(product.letters)
    contracted = [letter for letter in q if letter and letter in k and letter not in out]
    shared = [letter for letter in q if letter and letter in k and letter in out]
    queries = [letter for letter in q if letter and letter not in k]
    extra = [letter for letter in k if letter and letter not in q and letter != tokens]
    if len(contracted) != 1 or extra or any(letter not in out for letter in queries) or len(letters.atoms(tokens)) != 1:
        raise Miss(
            "the product is no product of queries and keys over their channels", product.node,
            advice="contract the channels alone: q [.., S, D] with k [.., T, D]",
        )
    fixed = {contracted[0]: "D", tokens: "T"}
    split = tuple(atom for letter in shared for atom in letters.atoms(letter))
    single = tuple(atom for letter in queries for atom in letters.atoms(letter))
    ways = _named(len(split), len(single), product.node)
    return keys[0], (Naming({**fixed, **dict(zip(split + single, named, strict=True))}) for named in ways)


def _named(shared: int, queries: int, node: fx.Node) -> Iterator[tuple[str, ...]]:
    """Yield the roles of the ``shared`` letters, then of the letters that only the queries have (``queries``), likeliest first.

    Raises Miss for numbers of dims that no known attention has.
    """
    heads: dict[int, list[tuple[str, ...]]] = {
        0: [()], 1: [("BH",)], 2: [("B", "H"), ("H", "B")], 3: [("B", "K", "G"), ("B", "G", "K"), ("K", "B", "G")],
    }
    kv: dict[int, list[tuple[str, ...]]] = {0: [()], 1: [("BK",)], 2: [("B", "K"), ("K", "B")]}
    if queries <= 1 and shared in heads:
        for names in heads[shared]:
            yield (*names, "S")[: shared + queries]
        for names in kv.get(shared, []) if queries else []:
            yield (*names, "G")
    elif queries == 2 and shared in kv:
        for names in kv[shared]:
            yield (*names, "S", "G")
            yield (*names, "G", "S")
    else:
        raise Miss(
            f"a product with {shared} dims that queries and keys share and {queries} of the queries alone", node,
            advice="use the dims [B, H, S, D] for queries and [B, H, T, D] for keys, or [B, K, G, S, D] and [B, K, T, D]",
        )
