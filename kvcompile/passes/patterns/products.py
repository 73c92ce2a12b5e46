"""The two matrix products of a spelled-out attention: matmul, bmm, baddbmm, einsum, each as roles of dims."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from kvcompile.passes.shapes import bind, op_name, sizes
from kvcompile.passes.sites import Miss

ROLES_BY_RANK = {3: ("BH",), 4: ("B", "H"), 5: ("B", "K", "G")}


@dataclass(frozen=True)
class Product:
    """left x right with the role of every dim of both and of the result."""

    node: fx.Node
    left: fx.Node
    left_roles: tuple[str, ...]
    right: fx.Node
    right_roles: tuple[str, ...]
    roles: tuple[str, ...]
    bias: fx.Node | None = None
    alpha: float = 1.0


def scores(node: fx.Node) -> Product | None:
    """Queries times keys, or None where ``node`` is no product."""
    name = op_name(node)
    arguments = bind(node) if name in {"matmul", "bmm", "baddbmm", "einsum"} else {}
    if name == "matmul" or name == "bmm":
        left, right = arguments["self"], arguments["other" if name == "matmul" else "mat2"]
        return _matmul_scores(node, left, right)
    if name == "baddbmm":
        if float(arguments["beta"]) != 1.0:
            raise Miss("baddbmm with a beta other than 1", node)
        product = _matmul_scores(node, arguments["batch1"], arguments["batch2"])
        return Product(
            node, product.left, product.left_roles, product.right, product.right_roles, product.roles,
            arguments["self"], float(arguments["alpha"]),
        )
    if name == "einsum":
        return _einsum_scores(node, arguments["equation"], list(arguments["tensors"]))
    return None


def _matmul_scores(node: fx.Node, left: fx.Node, right: fx.Node) -> Product:
    rank = len(sizes(left))
    if rank not in ROLES_BY_RANK or len(sizes(right)) != rank:
        raise Miss("a matrix product of ranks that are no attention", node)
    batch = ROLES_BY_RANK[rank]
    right_batch = tuple("" if size == 1 and role == "G" else role for role, size in zip(batch, sizes(right), strict=False))
    return Product(node, left, (*batch, "S", "D"), right, (*right_batch, "D", "T"), (*batch, "S", "T"))


def _terms(equation: str) -> tuple[list[str], str]:
    text = equation.replace(" ", "")
    if "->" not in text or "." in text:
        raise Miss(f"the einsum {equation!r} has no explicit result or an ellipsis")
    inputs, _, output = text.partition("->")
    return inputs.split(","), output


def _einsum_scores(node: fx.Node, equation: str, operands: list[fx.Node]) -> Product | None:
    inputs, output = _terms(equation)
    if len(inputs) != 2:
        return None
    left, right = inputs
    contracted = [letter for letter in left if letter in right and letter not in output]
    shared = [letter for letter in left if letter in right and letter in output]
    queries = [letter for letter in left if letter not in right]
    tokens = [letter for letter in right if letter not in left]
    if len(contracted) != 1 or len(tokens) != 1 or not queries or len(queries) > 2 or not 1 <= len(shared) <= 2:
        return None
    names = {contracted[0]: "D", tokens[0]: "T"}
    if len(shared) == 2:
        names[shared[0]], names[shared[1]] = "B", "K" if len(queries) == 2 else "H"
    else:
        # One kv head shared by all queries, or no batch dim at all.
        names[shared[0]] = "B"
    if len(queries) == 2:
        heads = shared[-1]
        after = left[left.index(heads) + 1] if left.index(heads) + 1 < len(left) else ""
        group = after if after in queries and len(shared) == 2 else _multi_query_head(queries, output, tokens[0])
        names[group] = "G" if len(shared) == 2 else "H"
        names[next(letter for letter in queries if letter != group)] = "S"
    else:
        names[queries[0]] = "S"
    roles = lambda letters: tuple(names[letter] for letter in letters)  # noqa: E731
    return Product(node, operands[0], roles(left), operands[1], roles(right), roles(output))


def _multi_query_head(queries: list[str], output: str, tokens: str) -> str:
    """Of two query-only letters the head: the one that does not stand right before the tokens in the scores."""
    before = output[output.index(tokens) - 1]
    return next(letter for letter in queries if letter != before)


def weighted(node: fx.Node, probs: fx.Node, roles: tuple[str, ...]) -> Product | None:
    """Probabilities times values, where ``probs`` (with ``roles``) is the left operand; None where it is not."""
    name = op_name(node)
    if name in {"matmul", "bmm"}:
        arguments = bind(node)
        left, right = arguments["self"], arguments["other" if name == "matmul" else "mat2"]
        if left is not probs or roles[-1] != "T" or len(sizes(right)) != len(roles):
            return None
        batch = tuple("" if role == "G" and sizes(right)[dim] == 1 else role for dim, role in enumerate(roles[:-2]))
        return Product(node, left, roles, right, (*batch, "T", "D"), (*roles[:-1], "D"))
    if name == "einsum":
        arguments = bind(node)
        operands = list(arguments["tensors"])
        inputs, output = _terms(arguments["equation"])
        if len(operands) != 2 or operands[0] is not probs:
            return None
        names = dict(zip(inputs[0], roles, strict=True))
        fresh = [letter for letter in inputs[1] if letter not in names]
        if len(fresh) != 1:
            return None
        names[fresh[0]] = "D"
        return Product(
            node, operands[0], roles, operands[1], tuple(names[letter] for letter in inputs[1]),
            tuple(names[letter] for letter in output),
        )
    return None
