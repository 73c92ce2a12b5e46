"""The house rules that ``make lint`` does not hold: errors teach, what is public says what it is."""

from __future__ import annotations

import ast
import inspect
import re
import string
import subprocess
from pathlib import Path

import pytest

from kvcompile import errors
from kvcompile.errors import KvcompileError

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "kvcompile").rglob("*.py"))
ERRORS = sorted(
    (item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, KvcompileError)), key=lambda item: item.__name__
)
LEAVES = [item for item in ERRORS if "template" in vars(item) and item is not KvcompileError]

LEFTOVERS = {"a path of one machine": r"/(work|root|home|tmp)/", "a leftover": r"\b(TODO|FIXME|XXX|HACK)\b"}
RIDDLES = ("The same", "Of ", "What ", "Those ", "Who ")
each_error = pytest.mark.parametrize("error", LEAVES, ids=lambda item: item.__name__)


def names_of(template: str) -> list[str]:
    """The facts that a template asks for."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


FACTORIES = {"tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm"}


def is_factory(node: ast.AST) -> bool:
    """Whether a node calls one of torch's functions that make a tensor on the default device."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    )


def test_every_tensor_that_is_made_names_its_device() -> None:
    """A user's default device must not move what the package makes for itself."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}" for path in MODULES for node in ast.walk(ast.parse(path.read_text()))
        if is_factory(node) and not any(keyword.arg in {"device", None} for keyword in node.keywords)
    ]
    assert not unnamed


@each_error
def test_error_says_what_was_expected_and_found_and_what_to_do(error: type[KvcompileError]) -> None:
    facts = {name: f"<{name}>" for name in names_of(error.template)}
    raised = error(**facts)
    text = str(raised)
    assert all(value in text or repr(value) in text for value in facts.values())
    assert not re.search(r"\{|\}", text.replace("{'*'", "").replace("'int8'}", "")), text
    assert raised.facts == facts
    expected = re.search(r"\b(expect|need|has the options|strict=True|no entry|maps|lost a fact)", text)
    assert expected, f"says nothing of what was expected: {text}"
    assert re.search(r"found|cannot|no entry", text), f"says nothing of what was found: {text}"
    # The advice is a fact of its own where it depends on the case.
    advice = re.search(r";|\b(pass|write|add|choose|cast|use|call|start|make|remove|correct|report)\b", text)
    assert advice or "todo" in facts or "why" in facts, f"says nothing of what to do: {text}"


@each_error
def test_error_without_its_facts_is_a_bug_that_shows(error: type[KvcompileError]) -> None:
    with pytest.raises(KeyError):
        error()


def test_every_error_is_caught_by_the_base_and_by_what_it_is() -> None:
    for error in ERRORS:
        assert issubclass(error, KvcompileError)
    assert issubclass(errors.SchemeError, ValueError)


def test_errors_are_raised_somewhere() -> None:
    text = "\n".join(path.read_text() for path in MODULES if path.name != "errors.py")
    unused = [error.__name__ for error in LEAVES if not re.search(rf"\b{error.__name__}\b", text)]
    assert not unused, f"no module raises {unused}"


def documented_elsewhere() -> set[str]:
    """Method names that some class of the package documents: an override need not say it again."""
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)}
    return found


DOCUMENTED = documented_elsewhere()


def _silent(path: Path) -> list[str]:
    """List what is public in a module and has no docstring."""
    tree, silent = ast.parse(path.read_text()), list[str]()
    if tree.body and not ast.get_docstring(tree):
        silent.append("the module")
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            template = isinstance(node, ast.ClassDef) and any(
                isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == "template" for item in node.body
            )
            if not ast.get_docstring(node) and not template:
                silent.append(f"{node.lineno}: {node.name}")
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            silent += [
                f"{item.lineno}: {node.name}.{item.name}" for item in node.body
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and not ast.get_docstring(item)
                and item.name not in DOCUMENTED
            ]
    return silent


def test_what_is_public_has_a_docstring() -> None:
    silent = [f"{path.relative_to(ROOT)}:{item}" for path in MODULES for item in _silent(path)]
    assert not silent, "nothing is said about:\n" + "\n".join(silent)


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Whoever has not read the code knows after the first words what is spoken of."""
    firsts = [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", (ast.get_docstring(node) or "").partition("\n")[0])
        for path in MODULES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
    ]
    wrong = [f"{place}: {first}" for place, first in firsts if first.startswith(RIDDLES)]
    assert firsts and not wrong, "\n".join(wrong)


def test_subjects_of_commits_are_short() -> None:
    asked = ["git", "log", "--no-merges", "--since=2026-11-23T10:00:00Z", "--format=%h %s"]
    done = subprocess.run(asked, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git repository")
    long = [line for line in done.stdout.splitlines() if len(line.partition(" ")[2]) > 72]
    assert not long, "subjects of more than 72 characters:\n" + "\n".join(long)


def test_no_place_or_leftover_in_the_source() -> None:
    texts = {path.relative_to(ROOT): path.read_text() for path in MODULES}
    wrong = [f"{path}: {what}" for path, text in texts.items() for what, pattern in LEFTOVERS.items() if re.search(pattern, text)]
    assert not wrong, "\n".join(wrong)
