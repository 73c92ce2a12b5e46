"""Operators: the wrong changes that are made of a source, one place at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is",
}
WRITTEN = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in",
    ast.Is: "is", ast.IsNot: "is not",
}
COMPUTED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//")}
CALLED = {
    "max": "min", "min": "max", "any": "all", "all": "any", "maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax",
}
TEXTUAL = (
    (r"(?<=\s)<=(?=\s)", "<"), (r"(?<=\s)<(?=\s)", "<="), (r"(?<=\s)>=(?=\s)", ">"), (r"(?<=\s)>(?=\s)", ">="), (r"(?<=\s)\+(?=\s)", "-"),
    (r"(?<=\s)-(?=\s)", "+"), (r"(?<=\s)\*(?=\s)", "+"), (r"(?<=\s)==(?=\s)", "!="), (r"(?<=\s)and(?=\s)", "or"), (r"(?<=\s)&(?=\s)", "|"),
    (r"(?<=\s)&&(?=\s)", "||"), (r"\btl\.maximum\b", "tl.minimum"), (r"\btl\.max\b", "tl.min"), (r"(?<=[\s(])0\.0(?=[,)])", "1.0"),
)
"""Changes of a template's text: what is printed from it is no Python before it is printed."""


@dataclass(frozen=True)
class Change:
    """One change: the number of the line from 0, the line as it is and as it becomes, and the function that it stands in."""

    line: int
    old: str
    new: str
    scope: str


def changes(name: str, source: str) -> Iterator[Change]:
    """Give all changes of a file's source, by its name's ending."""
    yield from _of_python(source) if name.endswith(".py") else _of_template(source)


def _of_template(source: str) -> Iterator[Change]:
    inside = False
    for number, line in enumerate(source.splitlines()):
        inside = (inside or "{#" in line) and "#}" not in line
        code = line.split("#")[0] if "{#" in line else re.split(r"\s#\s|//", line)[0]
        if inside or "#}" in line or not code.strip():
            continue
        for pattern, becomes in TEXTUAL:
            for found in re.finditer(pattern, code):
                yield Change(number, line, line[: found.start()] + becomes + line[found.end() :], "")


def _of_python(source: str) -> Iterator[Change]:
    lines = source.splitlines()
    for scope, node in _functions(ast.parse(source), ""):
        for item in ast.walk(node):
            for number, start, stop, becomes in _edits(item, lines):
                old = lines[number]
                new = old[:start] + becomes + old[stop:]
                if new != old:
                    yield Change(number, old, new, scope)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Give the functions of a module with their dotted names, the outermost ones of each class alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


Edit = tuple[int, int, int, str]


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Give (line, from column, to column, text) of the wrong changes of one node that stands in one line."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind = type(node.ops[0])
        yield from _between(node.left, node.comparators[0], WRITTEN[kind], COMPARED[kind], lines)
    elif isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        # Of three operands one change would bind otherwise: and goes before or.
        if len(node.values) == 2:
            yield from _between(*node.values, *words, lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield from _between(node.left, node.right, *COMPUTED[type(node.op)], lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
        # The operand may be in brackets, which count as no part of it.
        yield node.lineno - 1, node.col_offset, node.col_offset + len("not "), ""
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CALLED and node.func.end_col_offset is not None:
            yield node.func.end_lineno - 1, node.func.end_col_offset - len(name), node.func.end_col_offset, CALLED[name]  # type: ignore[operator]
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        yield node.value.lineno - 1, node.value.col_offset, node.value.end_col_offset or 0, str(not node.value.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.end_col_offset is not None:
        yield node.lineno - 1, node.col_offset, node.end_col_offset, str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        yield node.lineno - 1, node.col_offset, node.end_col_offset or 0, "pass"
    elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
        yield node.test.lineno - 1, node.test.col_offset, node.test.end_col_offset or 0, "False"


def _between(left: ast.expr, right: ast.expr, old: str, new: str, lines: list[str]) -> Iterator[Edit]:
    """Give the change of an operator between two operands that stand in one line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    number = right.lineno - 1
    # Columns of the parser count bytes.
    if not lines[number].isascii():
        return
    at = lines[number].find(old, left.end_col_offset, right.col_offset)
    if at >= 0:
        yield number, at, at + len(old), new
