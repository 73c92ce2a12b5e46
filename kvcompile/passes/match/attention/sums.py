"""Scores as a sum of two products: queries and keys multiplied over two runs of channels.

    q1 . k1 + q2 . k2 = [q1, q2] . [k1, k2]

Models that cache a latent and a rotary part apart spell their attention in this way.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from kvcompile.passes.graph.constants import constant
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.shapes import is_tensor, op_name
from kvcompile.passes.match.attention.products import Product, product
from kvcompile.passes.match.attention.roles import Naming
from kvcompile.passes.match.sites import Miss, SecondProduct


@dataclass(frozen=True)
class Summand:
    """A product that is added to scores of the same dims, times ``factor``, with the nodes that compute it."""

    product: Product
    factor: float
    nodes: tuple[fx.Node, ...]


def summand(node: fx.Node, first: Product) -> Summand | None:
    """Return the product of queries and keys that ``node`` computes, up to copies and constant factors.

    None if it computes none, or if the product's operands vary along other dims of the scores than the operands of ``first``. Raises Miss
    for a product that cannot be read.
    """
    nodes, factor = [node], 1.0
    while (found := product(node)) is None:
        value = constant(node.args[1]) if op_name(node) in {"mul", "div"} else 1.0 if op_name(node) in COPIES else None
        if not value or not is_tensor(node.args[0]):
            return None
        factor *= value if op_name(node) != "div" else 1 / value
        node = node.args[0]
        nodes.append(node)
    if found.bias is not None or found.factors or len(found.letters) != len(first.letters):
        return None
    if len(_contracted(found)) != 1 or [spelled(found, side) for side in (0, 1)] not in ([spelled(first, 0), spelled(first, 1)],
                                                                                        [spelled(first, 1), spelled(first, 0)]):
        return None
    return Summand(found, factor * found.alpha, tuple(nodes))


def _contracted(found: Product) -> list[str]:
    (_, left), (_, right) = found.operands()
    return [letter for letter in left if letter and letter in right and letter not in found.letters]


def spelled(found: Product, side: int) -> frozenset[int]:
    """Return the indices of the result's dims along which operand ``side`` of a product varies."""
    return frozenset(found.letters.index(letter) for letter in found.operands()[side][1] if letter in found.letters)


def beside(item: Summand, first: Product, tokens: str, naming: Naming) -> SecondProduct:
    """Return ``item``, a second product added to the scores, as its query and key operands with the role of each dim.

    Roles are those that ``naming`` gives to the dims of the scores; ``tokens`` is the letter of the cached tokens in ``first``, the first
    product. Raises Miss if ``item`` is not a product of queries and keys.
    """
    names = {letter: naming.names.get(first.letters[at], "") for at, letter in enumerate(item.product.letters)}
    names |= {_contracted(item.product)[0]: "D", "": ""}
    sides = item.product.operands()
    at = first.letters.index(tokens)
    key = next((side for side in (0, 1) if at in spelled(item.product, side)), None)
    if key is None or at in spelled(item.product, 1 - key):
        raise Miss("a second product is added to the scores that is none of queries and keys", item.product.node,
                   advice="add a second product of queries and keys over other channels, or a mask")
    (q, q_letters), (k, k_letters) = sides[1 - key], sides[key]
    return SecondProduct(q, tuple(names[letter] for letter in q_letters), k, tuple(names[letter] for letter in k_letters), item.factor)
