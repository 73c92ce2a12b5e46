"""Build the documentation's site: the repository's Markdown goes in, ``docs/site/html`` comes out; a link to nothing is an error.

Pages are staged at their paths in the repository, so a link that works in a clone works in the site. ``make docs`` runs this.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = HERE / "pages"
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def main() -> int:
    """Stage the pages, and what they link to, and run mkdocs; returns its exit code."""
    shutil.rmtree(PAGES, ignore_errors=True)
    waiting = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.png"), ROOT / "benchmarks" / "TABLES.md"]
    staged: set[Path] = set()
    while waiting:
        path = waiting.pop().resolve()
        if path in staged or HERE in path.parents or not path.is_file():
            continue
        staged.add(path)
        target = PAGES / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.suffix == ".md":
            waiting += [path.parent / link for link in LINK.findall(path.read_text())]
    (PAGES / "reference.md").write_text(reference())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(HERE / "mkdocs.yml")]
    return subprocess.run(command, check=False).returncode


def reference() -> str:
    """Return the page of all public names, each with its signature and docstring."""
    tree = ast.parse((ROOT / "kvcompile" / "__init__.py").read_text())
    given = next(node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    names = sorted(ast.literal_eval(given), key=str.lower)
    return "# Reference\n\nEvery public name of `kvcompile`.\n\n" + "\n\n".join(f"::: kvcompile.{name}" for name in names) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
