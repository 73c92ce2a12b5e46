"""``tests/slow.txt`` names tests that are there: a name that is none any more would leave its test to the quick suite, unseen."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_line_is_a_test() -> None:
    lines = [line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    gone = [line for line in lines if line.split("::")[1].split("[")[0] not in functions(ROOT / line.split("::")[0])]
    assert not gone, gone


def functions(path: Path) -> set[str]:
    """The names of a file's functions, none where there is no file."""
    if not path.exists():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
