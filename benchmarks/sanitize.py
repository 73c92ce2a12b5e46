"""Kernels under compute-sanitizer: a prompt, decode steps and a second request of small models, one process per scheme and tool.

``python -m benchmarks.sanitize`` needs a GPU and compute-sanitizer (CUDA toolkit). ``memcheck`` finds reads and writes outside of
allocations, with PyTorch's caching allocator off, so that each tensor is an allocation of its own; ``racecheck`` finds races in shared
memory. The result is right where every program runs to its end and the tool says 0 errors, or only races inside of library kernels
(cuDNN's attention on Hopper is reported to race with itself; stock models run it too), which are counted apart.

A case runs once without a tool first, so that its kernels lie compiled on disk and the tool's time goes to kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

TOOLS = ("memcheck", "racecheck")
CASES = (
    "llama-dense-static-compiled-default-d64-padded-bfloat16",
    "llama-int8-static-compiled-default-d64-padded-bfloat16",
    "llama-fp8-static-compiled-default-d64-padded-bfloat16",
    "llama-int4-static-compiled-default-d64-padded-bfloat16",
    "llama-int4-dynamic-compiled-default-d80-padded-float16",
    "llama-kivi-static-compiled-default-d64-padded-bfloat16",
    "llama-kivi-static-compiled-default-d128-one-float32",
    "llama-squat-static-compiled-default-d64-one-bfloat16",
    "llama-certified-static-compiled-default-d64-padded-bfloat16",
    "gemma2/eager-int8-static-compiled-default-d64-one-bfloat16",
    "deepseek_v3-int8-static-compiled-default-d64-one-float32",
    "block-table-int8-static-compiled-default-d64-padded-bfloat16",
)
"""Cases of the acceptance run that hold every scheme's kernels, a window that goes around, a latent and a pool of blocks."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
RACE = re.compile(r"Race reported between \w+ access at (\S+)\+0x\w+\s*=*\s*and \w+ access at (\S+)\+0x")
LIBRARY = ("cudnn", "cublas", "cutlass")
FOUND = 99
"""The status with which a tool ends a program that ran to its end, where it found something."""


@dataclass(frozen=True)
class Finding:
    """The result of one tool on one case; ``errors``: the number in the tool's summary, None without one; ``said``: its first lines.

    ``foreign``: how many of the errors are races of a library's kernel with itself.
    """

    case: str
    tool: str
    status: int
    errors: int | None
    seconds: float
    said: str = ""
    foreign: int = 0

    @property
    def clean(self) -> bool:
        """Return whether the program ran to its end and the tool found nothing in kernels of ours or of torch."""
        return self.status == (FOUND if self.errors else 0) and self.errors == self.foreign


def exercise(identifier: str, steps: int = 4) -> None:
    """Send two short requests of a case through the compiled model, without any reference; raises what the model raises."""
    import torch

    import kvcompile
    from benchmarks.accept.axes import Trait
    from benchmarks.accept.cases import by_id
    from benchmarks.accept.modules import Module
    from benchmarks.accept.subjects import LONG, SHORT, Words, quiet
    from benchmarks.accept.traces import compiled, fresh

    case, device = by_id(identifier), torch.device("cuda")
    with quiet(), fresh():
        module = Trait.MODULE in case.architecture.traits
        subject = Module.build(case, device) if module else Words.build(case, device, 1)
        owner = kvcompile.backend(case.scheme.spec(int(case.head_dim)))
        requests = [subject.request(7, LONG, steps), subject.request(8, LONG if module else SHORT, steps)]
        trace, _ = compiled(subject, requests, owner, lambda: 0)
        torch.cuda.synchronize()
    assert any(graph.sites for graph in owner.graphs), "nothing was rewritten"
    assert all(torch.isfinite(logits).all() for request in trace.logits for logits in request), "logits are not finite"


def command(case: str, steps: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sanitize", "--exercise", case, "--steps", str(steps)]


def environment() -> dict[str, str]:
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **alone}


def compiled_first(case: str, steps: int, timeout: float) -> None:
    """Run a case without a tool, so that its kernels are in the caches on disk; what fails here fails under the tools too."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command(case, steps), capture_output=True, timeout=timeout, env=environment(), check=False)


def foreign_races(text: str) -> int:
    """Return how many of the races in a tool's output are between accesses of kernels of libraries."""
    return sum(all(name.startswith(LIBRARY) for name in pair) for pair in RACE.findall(text))


def checked(program: str, case: str, tool: str, options: argparse.Namespace) -> Finding:
    """Return what ``tool`` says of a case, run in a process of its own."""
    started, timeout = time.monotonic(), options.timeout
    chosen = ["--kernel-regex", options.kernels] if options.kernels else []
    tooled = [program, "--tool", tool, "--error-exitcode", str(FOUND), *chosen, *command(case, options.steps)]
    try:
        done = subprocess.run(tooled, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)
    except subprocess.TimeoutExpired:
        return Finding(case, tool, -1, None, time.monotonic() - started, f"not done after {timeout:.0f} s")
    text = done.stdout + done.stderr
    counts = [int(found[1] or found[2]) for found in SUMMARY.finditer(text)]
    errors = max(counts) if counts else None
    lines = [line for line in text.splitlines() if line.startswith("=========") and line.strip("= ")]
    said = "" if done.returncode == 0 and errors == 0 else "\n".join([*lines[:40], *text.splitlines()[-15:]])
    return Finding(case, tool, done.returncode, errors, time.monotonic() - started, said, foreign_races(text))


def main() -> int:
    """Run the cases under the tools and print a table; return 0 where all are clean."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--exercise", metavar="CASE", help="run one case in this process, without a tool")
    parser.add_argument("--only", default="", metavar="SUBSTRINGS", help="cases by parts of their identifiers, with commas between")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--timeout", type=float, default=400, help="seconds a process may take")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of each of the two requests")
    parser.add_argument("--kernels", metavar="FILTER", help="the tools' --kernel-regex; without it all kernels are checked, torch's too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.exercise:
        exercise(options.exercise, options.steps)
        return 0
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise SystemExit("expected compute-sanitizer on the PATH or in /usr/local/cuda/bin, found none: install the CUDA toolkit")
    cases = [case for case in CASES if any(part in case for part in options.only.split(","))]
    work = [(case, tool) for case in cases for tool in options.tools.split(",")]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda case: compiled_first(case, options.steps, options.timeout), cases))
        findings = list[Finding]()
        for done in as_completed([pool.submit(checked, program, *each, options) for each in work]):
            findings.append(item := done.result())
            if options.json:
                # A run that is cut off leaves what it found.
                options.json.write_text(json.dumps([asdict(each) for each in findings], indent=1))
            print(f"{item.seconds:4.0f} s  {item.tool:10} {'clean' if item.clean else item.errors}  {item.case}", flush=True)
    table = Table("case", "tool", "status", "errors", "in libraries", "s")
    for item in findings:
        table.add_row(
            item.case, item.tool, str(item.status), str(item.errors), str(item.foreign), f"{item.seconds:.0f}",
            style=None if item.clean else "red",
        )
    Console(width=140).print(table)
    for item in findings:
        if not item.clean:
            print(f"--- {item.case} {item.tool}\n{item.said}")
    return int(not all(item.clean for item in findings))


if __name__ == "__main__":
    sys.exit(main())
