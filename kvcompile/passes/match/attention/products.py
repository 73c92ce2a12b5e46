"""Tensor products of every spelling (matmul, bmm, mm, baddbmm, addmm, einsum), with a letter for each dim as in einsum.

A product alone does not show an attention. The roles of its letters are read later (``roles``), from the dim that the softmax runs over and
from the letters that the two products share.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import fx

from kvcompile.passes.graph.operators import Kind, named
from kvcompile.passes.graph.shapes import bind, is_tensor, op_name, sizes
from kvcompile.passes.match.sites import Factor, Miss

NAMES = named(Kind.PRODUCT) | {"mm", "addmm"}
SPELL = "write it as torch.matmul, torch.bmm or a two-operand torch.einsum with single letters"


@dataclass(frozen=True)
class Product:
    """A tensor product, alpha * left x right (+ bias), with a letter for every dim; '' for a dim of size one that broadcasts."""

    node: fx.Node
    left: fx.Node
    left_letters: tuple[str, ...]
    right: fx.Node
    right_letters: tuple[str, ...]
    letters: tuple[str, ...]
    bias: fx.Node | None = None
    alpha: float = 1.0
    factors: tuple[Factor, ...] = ()
    """The factor where only a call knows it; ``alpha`` is then 1."""

    def operands(self) -> tuple[tuple[fx.Node, tuple[str, ...]], tuple[fx.Node, tuple[str, ...]]]:
        """Return the left operand with its letters, and the right operand with its letters."""
        return (self.left, self.left_letters), (self.right, self.right_letters)


def product(node: fx.Node) -> Product | None:
    """Return the product that a node computes, None for other nodes; raises Miss where it cannot be read."""
    name = op_name(node)
    if name not in NAMES:
        return None
    arguments = bind(node)
    if name == "matmul":
        return _matmul(node, arguments["self"], arguments["other"])
    if name in {"bmm", "mm"}:
        return _matmul(node, arguments["self"], arguments["mat2"])
    if name in {"baddbmm", "addmm"}:
        first, second = (arguments["batch1"], arguments["batch2"]) if name == "baddbmm" else (arguments["mat1"], arguments["mat2"])
        found = _matmul(node, first, second)
        if isinstance(arguments["beta"], fx.Node):
            raise Miss(f"{name} with a beta that only the call knows", node, advice="add the bias to the scores with beta=1")
        beta, alpha = float(arguments["beta"]), arguments["alpha"]
        factors = (Factor(alpha),) if isinstance(alpha, fx.Node) else ()
        if found is None or beta not in {0.0, 1.0}:
            raise Miss(f"{name} with a beta other than 0 or 1", node, advice="add the bias to the scores with beta=1")
        bias = arguments["self"] if beta else None
        alpha = 1.0 if factors else float(alpha)
        return Product(node, found.left, found.left_letters, found.right, found.right_letters, found.letters, bias, alpha, factors)
    return _einsum(node, arguments["equation"], list(arguments["tensors"]))


def _matmul(node: fx.Node, left: fx.Node, right: fx.Node) -> Product | None:
    """Return a matrix product over the last two dims; None for vectors, or for more than 20 dims."""
    rank = len(sizes(node))
    if min(len(sizes(left)), len(sizes(right))) < 2 or rank > 20:
        return None
    batch = string.ascii_lowercase[: rank - 2]
    return Product(
        node, left, (*_aligned(left, node, batch), "x", "z"), right, (*_aligned(right, node, batch), "z", "y"), (*batch, "x", "y"),
    )


def _aligned(operand: fx.Node, node: fx.Node, batch: str) -> tuple[str, ...]:
    """Return the batch letters of an operand, aligned right with the result's; '' for a dim that broadcasts."""
    shape = sizes(operand)[:-2]
    full = sizes(node)[:-2]
    letters = batch[len(batch) - len(shape) :]
    wholes = full[len(full) - len(shape) :]
    return tuple("" if size == 1 and whole != 1 else letter for size, letter, whole in zip(shape, letters, wholes, strict=True))


def _einsum(node: fx.Node, equation: str, operands: list[fx.Node]) -> Product | None:
    """Return an einsum of two tensors as a product; raises Miss for a diagonal, or for another number of operands."""
    if len(operands) != 2 or not all(is_tensor(item) for item in operands):
        raise Miss(f"the einsum {equation!r} has {len(operands)} operands", node, advice=SPELL)
    text = equation.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    longest = 0
    for term, operand in zip(terms, operands, strict=True):
        if "..." in term:
            longest = max(longest, len(sizes(operand)) - len(term.replace("...", "")))
    spare = [letter for letter in string.ascii_letters if letter not in text]
    dots = spare[:longest]
    if not arrow:
        named = inputs.replace("...", "").replace(",", "")
        output = ("..." if "..." in inputs else "") + "".join(sorted(letter for letter in set(named) if named.count(letter) == 1))
    letters = []
    for term, operand in zip(terms, operands, strict=True):
        count = len(sizes(operand)) - len(term.replace("...", ""))
        letters.append(_spread(term, dots[longest - count :] if "..." in term else []))
    out = _spread(output, dots)
    full = dict(zip(out, sizes(node), strict=True))
    read = []
    for spelled, operand in zip(letters, operands, strict=True):
        if len(set(spelled)) != len(spelled):
            raise Miss(f"the einsum {equation!r} takes a diagonal", node, advice=SPELL)
        read.append(tuple(
            "" if letter in dots and size == 1 and full.get(letter, 1) != 1 else letter
            for letter, size in zip(spelled, sizes(operand), strict=True)
        ))
    return Product(node, operands[0], read[0], operands[1], read[1], out)


def _spread(term: str, dots: list[str]) -> tuple[str, ...]:
    """Return the letters of an einsum term, with its ellipsis replaced by ``dots``."""
    head, found, tail = term.partition("...")
    return (*head, *(dots if found else ()), *tail)
