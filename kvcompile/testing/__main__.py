"""``python -m kvcompile.testing file.py``: try every law on the schemes that a file defines, and print how each went."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from kvcompile.errors import KvcompileError
from kvcompile.schemes import Scheme
from kvcompile.testing.files import schemes_of
from kvcompile.testing.suite import LAWS, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 if all laws hold, 1 if some are broken, 2 if there is no scheme."""
    parser = argparse.ArgumentParser(prog="python -m kvcompile.testing", description="Try every law of a scheme on yours.")
    parser.add_argument("scheme", help="a file that defines a scheme, or the name of a registered one")
    parser.add_argument("--law", action="append", metavar="NAME", choices=[law.name for law in LAWS], help="this one only; may be repeated")
    arguments = parser.parse_args(argv)
    try:
        return max(try_laws(scheme, arguments.law) for scheme in schemes_of(arguments.scheme))
    except KvcompileError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def try_laws(scheme: type[Scheme], names: Sequence[str] | None = None) -> int:
    """Try the named laws, or all without names, and print a line for each; return 1 if one is broken, else 0."""
    console, broken = Console(markup=False, highlight=False, soft_wrap=True), 0
    before = time.monotonic()
    for outcome in outcomes(scheme, [law for law in LAWS if not names or law.name in names]):
        now = time.monotonic()
        said = "broken" if outcome.broken else f"not tried: {outcome.left_out}" if outcome.left_out else "holds"
        console.print(f"{scheme.name}  {outcome.law.name:<52}{outcome.tried:3} settings {now - before:6.1f} s  {said}")
        if outcome.broken:
            broken += 1
            console.print(f"    {outcome.broken}", style="red")
        before = now
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
