"""Command line of the acceptance run: ``python -m benchmarks.accept``; see benchmarks/ACCEPT.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.accept.cases import all_cases, by_id, cpu_slice
from benchmarks.accept.outcomes import Outcome, Result
from benchmarks.accept.table import as_csv, as_json, count_table, screen, summary


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accept", description=__doc__)
    parser.add_argument("--slice", choices=("all", "cpu"), default="all", help="all cases, or the few that are part of make test")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run the cases whose identifier contains this")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run what was neither right nor refused in this JSON of an earlier run")
    parser.add_argument("--case", metavar="ID", help="run one case in this process and let its exception through")
    parser.add_argument("--list", action="store_true", help="print the identifiers and run nothing")
    parser.add_argument("--layers", type=int, default=0, help="layers of a model (default: 2, or one of each kind in --slice cpu)")
    parser.add_argument("--jobs", type=int, default=0, help="processes side by side (default: cores less two; without a GPU half)")
    parser.add_argument("--limit-seconds", type=float, default=540, help="start no case after this long (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=0, help="seconds a case may take (default: 150 with a GPU, 600 without)")
    parser.add_argument("--all-rows", action="store_true", help="show all results in the table, not the failures alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all results as CSV, one row a case")
    parser.add_argument("--count", type=Path, nargs="+", metavar="CSV", help="count the cases of such files by outcome, run nothing")
    return parser.parse_args(given)


def _chosen(options: argparse.Namespace) -> list[str]:
    from benchmarks.accept.ten_lines import TEN_LINES

    cases = cpu_slice() if options.slice == "cpu" else all_cases()
    readme = TEN_LINES if options.slice == "all" else ()
    names = [name for name in (*readme, *(case.id for case in cases)) if options.only in name]
    if options.again is None:
        return names
    done = {Outcome.RIGHT.value, Outcome.REFUSED.value}
    settled = {item["id"] for item in json.loads(options.again.read_text())["results"] if item["outcome"] in done}
    return [name for name in names if name not in settled]


def _one(identifier: str, layers: int, console: Console) -> int:
    from benchmarks.accept.drive import run_case
    from benchmarks.accept.ten_lines import TEN_LINES, check, execute

    if identifier in TEN_LINES:
        mode = identifier.removeprefix("readme-")
        check(execute(None if mode == "default" else mode))
        return 0
    result = run_case(by_id(identifier), layers, raises=True)
    console.print(result.plain())
    return int(result.outcome.failed)


def _about() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {"device": device, "torch": torch.__version__, "transformers": version("transformers")}


def _written(options: argparse.Namespace, results: Sequence[Result], about: dict[str, str]) -> None:
    if options.json:
        options.json.write_text(as_json(results, about))
    if options.csv:
        options.csv.write_text(as_csv(results))


def main(given: Sequence[str] | None = None) -> int:
    """Run the cases that the arguments name; return 0 where none failed and all were run, 1 otherwise."""
    started, options, console = time.monotonic(), _arguments(given), Console()
    layers = options.layers or (1 if options.slice == "cpu" else 2)
    if options.count:
        print(count_table(options.count), end="")
        return 0
    if options.case:
        return _one(options.case, layers, console)
    names = _chosen(options)
    if options.list:
        print("\n".join(names))
        return 0
    import torch

    from benchmarks.accept.run import Pool

    gpu, cores = torch.cuda.is_available(), os.cpu_count() or 2
    # Workers share the machine: each compiles in its own process.
    os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"})
    jobs, timeout = options.jobs or max(1, cores - 2 if gpu else cores // 2), options.timeout or (150 if gpu else 600)
    log = Path(tempfile.gettempdir()) / "kvcompile_accept.log"
    results: list[Result] = []
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(names))
        for result in Pool(jobs, timeout, started + options.limit_seconds, layers, log).results(names):
            results.append(result)
            # A run that is cut off leaves what it found.
            _written(options, results, {"seconds": f"{time.monotonic() - started:.0f}", "jobs": str(jobs)})
            bar.update(task, advance=1, description=f"{sum(item.outcome.failed for item in results)} failed")
            if result.outcome.failed or not console.is_terminal:
                line = f"{result.outcome.value:16}{result.seconds:5.0f} s  {result.id}  {result.detail}"
                bar.console.print(line, highlight=False, markup=False)
    console.print(screen(results, options.all_rows))
    unrun = sum(result.outcome is Outcome.NOT_RUN for result in results)
    said = f"; {unrun} were not run" if unrun else ""
    console.print(f"{summary(results)}; {time.monotonic() - started:.0f} s on {jobs} processes{said}")
    _written(options, results, {**_about(), "seconds": f"{time.monotonic() - started:.0f}", "jobs": str(jobs)})
    return int(unrun > 0 or any(result.outcome.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
