"""The direction of imports, read from the sources: one way from types to the command line, nothing sideways.

What may import what is one table. A module that is imported inside a function counts too: laziness is about
time, not about direction.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvcompile"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for folder in ("kvcompile", "examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))

SOFT, HARD = 300, 500
"""Lines of a module: above the first it is named in a warning, above the second refused."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
COMMAND_LINE = {"kvcompile.cli", "kvcompile.targets"}
"""The modules that may know model families; plus whatever stands in a ``kvcompile.cli`` package."""


def dotted(path: Path) -> str:
    """``kvcompile/passes/match.py`` is ``kvcompile.passes.match``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a source imports, ours resolved to the module where ``from kvcompile.x import y`` names one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                place = ROOT.joinpath(*f"{node.module}.{alias.name}".split("."))
                ours = place.with_suffix(".py").exists() or place.is_dir()
                yield f"{node.module}.{alias.name}" if ours else node.module or "", node.lineno


def within(name: str, *roots: str) -> bool:
    """Whether a dotted name is one of ``roots`` or stands below one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


ALLOWED = {
    "kvcompile.types": (),
    "kvcompile.errors": (),
    "kvcompile.settings": ("kvcompile.errors",),
    "kvcompile.schemes": ("kvcompile.types", "kvcompile.errors", "kvcompile.schemes"),
    "kvcompile.passes": ("kvcompile.types", "kvcompile.errors", "kvcompile.schemes", "kvcompile.passes"),
    "kvcompile.lowering": ("kvcompile.types", "kvcompile.errors", "kvcompile.settings", "kvcompile.schemes", "kvcompile.lowering"),
    "kvcompile.runtime": (
        "kvcompile.types", "kvcompile.errors", "kvcompile.schemes", "kvcompile.passes", "kvcompile.lowering.ops",
        "kvcompile.lowering.rings", "kvcompile.runtime",
    ),
    "kvcompile.report": ("kvcompile.types", "kvcompile.passes", "kvcompile.schemes"),
}
"""What a layer may import of ours. What is not listed (backend, explain, the command line) stands on top of all."""


def layer_of(name: str) -> str | None:
    """The layer of a module, None for those on top."""
    return next((layer for layer in ALLOWED if within(name, layer)), None)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_direction(path: Path) -> None:
    layer = layer_of(dotted(path))
    if layer is None:
        return
    for name, line in imports(path):
        if within(name, "kvcompile") and name != "kvcompile":
            fine = any(within(name, root) for root in ALLOWED[layer]) or any(root.startswith(name + ".") for root in ALLOWED[layer])
            assert fine, f"{dotted(path)}:{line} imports {name}: {layer} may import {ALLOWED[layer]}"
        assert name != "kvcompile", f"{dotted(path)}:{line} imports the whole package"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_lowering_touches_inductor_and_triton(path: Path) -> None:
    for name, line in imports(path):
        if within(name, "torch._inductor", "triton"):
            assert within(dotted(path), "kvcompile.lowering"), f"{dotted(path)}:{line} imports {name}: only kvcompile.lowering may"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_the_command_line_knows_transformers(path: Path) -> None:
    for name, line in imports(path):
        if within(name, "transformers"):
            assert within(dotted(path), *COMMAND_LINE), f"{dotted(path)}:{line} imports {name}: no model families in the library"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_model_family_is_named_in_the_passes(path: Path) -> None:
    if not within(dotted(path), "kvcompile.passes"):
        return
    text = path.read_text().lower()
    for family in ("llama", "mistral", "gemma", "qwen", "gpt2", "bloom", "falcon", "mixtral"):
        assert family not in text, f"{dotted(path)} names {family}: recognisers are about graphs"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_and_sizes(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES, f"{path.stem} says nothing about what is in it"
    lines = len(path.read_text().splitlines())
    if PACKAGE in path.parents and lines > SOFT:
        warnings.warn(f"{dotted(path)} has {lines} lines, soft cap {SOFT}", stacklevel=1)
    assert lines <= (HARD if ROOT / "tests" not in path.parents else HARD + SOFT), f"{path} has {lines} lines: split it"


def test_importing_the_package_loads_no_compiler_and_no_model_library() -> None:
    look = "import sys, {}; print([name for name in ('triton', 'transformers', 'matplotlib', 'torch._inductor') if name in sys.modules])"
    plain, ours = (
        subprocess.run([sys.executable, "-c", look.format(name)], check=True, capture_output=True, text=True, cwd=ROOT).stdout
        for name in ("torch._dynamo", "kvcompile")
    )
    assert ours == plain
