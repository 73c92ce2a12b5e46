"""``kvcompile bench``: runs a benchmark of the checkout, from the folder ``benchmarks/``, and draws its figures."""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from pathlib import Path

import kvcompile
from kvcompile.errors import NothingToMeasure

FOLDER = Path(kvcompile.__file__).resolve().parent.parent / "benchmarks"


def scripts() -> dict[str, Path]:
    """Return this checkout's benchmarks by name, extensions' included; empty if only the package is installed."""
    found = (*FOLDER.glob("*.py"), *FOLDER.glob("extensions/*/*.py"))
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem) if path.stem != "plot"}


def names() -> list[str]:
    """Return the names of this checkout's benchmarks, sorted."""
    return list(scripts())


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its own options; all other options are passed to the benchmark."""
    bench = commands.add_parser(
        "bench", help="time kernels, steps and memory against SDPA and stock torch.compile",
        description="Run benchmarks/NAME.py of this checkout.",
    )
    bench.add_argument("name", metavar="NAME", help=f"one of {', '.join(names()) or 'nothing: this needs a checkout of the repository'}")
    bench.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...",
        help="--json FILE keeps the figures, --plot FILE draws them (attention), anything else is the benchmark's own",
    )
    bench.set_defaults(run="kvcompile.tools.cli.bench:run")


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark and return its exit status. Raises NothingToMeasure if none has that name."""
    if arguments.name not in names():
        raise NothingToMeasure(
            expected=f"a benchmark of this checkout ({', '.join(names()) or 'none: only the package is installed'})", found=arguments.name,
            todo="clone the repository and run it there" if not names() else "name one of them",
        )
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--json", type=Path)
    shared.add_argument("--plot", type=Path)
    ours, own = shared.parse_known_args(arguments.rest)
    with tempfile.TemporaryDirectory() as scratch:
        figures = ours.json or (Path(scratch) / "figures.json" if ours.plot else None)
        kept = ["--json", str(figures)] if figures is not None else []
        before = sys.argv
        sys.argv = [str(scripts()[arguments.name]), *kept, *own]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as done:
            if done.code:
                return done.code if isinstance(done.code, int) else 1
        finally:
            sys.argv = before
        if ours.plot:
            drawn = runpy.run_path(str(FOLDER / "plot.py"))
            drawn["draw"](figures, ours.plot)
    return 0
