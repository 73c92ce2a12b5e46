"""Kernels under compute-sanitizer: a prompt, decode steps and a second request of small models, one process per scheme and tool.

``python -m benchmarks.sanitize`` needs a GPU and compute-sanitizer (CUDA toolkit). ``memcheck`` finds reads and writes outside of
allocations, with PyTorch's caching allocator off, so that each tensor is an allocation of its own; ``racecheck`` finds races in shared
memory. The result is right where every process ends with status 0 and the tool's summary says 0 errors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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


@dataclass(frozen=True)
class Finding:
    """The result of one tool on one case. ``errors``: the number in the tool's summary, None without one. ``said``: its first lines."""

    case: str
    tool: str
    status: int
    errors: int | None
    seconds: float
    said: str = ""

    @property
    def clean(self) -> bool:
        """Return whether the program ended well and the tool found nothing."""
        return self.status == 0 and self.errors == 0


def exercise(identifier: str) -> None:
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
        owner = kvcompile.backend(case.scheme.spell(int(case.head_dim)))
        requests = [subject.request(7, LONG, 4), subject.request(8, LONG if module else SHORT, 4)]
        trace, _ = compiled(subject, requests, owner, lambda: 0)
        torch.cuda.synchronize()
    assert any(graph.sites for graph in owner.graphs), "nothing was rewritten"
    assert all(torch.isfinite(logits).all() for request in trace.logits for logits in request), "logits are not finite"


def checked(program: str, case: str, tool: str, timeout: float) -> Finding:
    """Return what ``tool`` says of a case, run in a process of its own."""
    started = time.monotonic()
    command = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, "-m", "benchmarks.sanitize", "--exercise", case]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Finding(case, tool, -1, None, time.monotonic() - started, f"not done after {timeout:.0f} s")
    text = done.stdout + done.stderr
    counts = [int(found[1] or found[2]) for found in SUMMARY.finditer(text)]
    errors = max(counts) if counts else None
    lines = [line for line in text.splitlines() if line.startswith("=========") and line.strip("= ")]
    said = "" if done.returncode == 0 and errors == 0 else "\n".join([*lines[:40], *text.splitlines()[-15:]])
    return Finding(case, tool, done.returncode, errors, time.monotonic() - started, said)


def main() -> int:
    """Run the cases under the tools and print a table; return 0 where all are clean."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--exercise", metavar="CASE", help="run one case in this process, without a tool")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="the cases whose identifier contains this")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--timeout", type=float, default=400, help="seconds a process may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.exercise:
        exercise(options.exercise)
        return 0
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise SystemExit("expected compute-sanitizer on the PATH or in /usr/local/cuda/bin, found none: install the CUDA toolkit")
    work = [(case, tool) for case in CASES if options.only in case for tool in options.tools.split(",")]
    with ThreadPoolExecutor(options.jobs) as pool:
        findings = []
        for item in pool.map(lambda item: checked(program, *item, options.timeout), work):
            findings.append(item)
            print(f"{item.seconds:4.0f} s  {item.tool:10} {'clean' if item.clean else item.errors}  {item.case}", flush=True)
    table = Table("case", "tool", "status", "errors", "s")
    for item in findings:
        table.add_row(
            item.case, item.tool, str(item.status), str(item.errors), f"{item.seconds:.0f}", style=None if item.clean else "red"
        )
    Console(width=140).print(table)
    for item in findings:
        if not item.clean:
            print(f"--- {item.case} {item.tool}\n{item.said}")
    if options.json:
        options.json.write_text(json.dumps([asdict(item) for item in findings], indent=1))
    return int(not all(item.clean for item in findings))


if __name__ == "__main__":
    sys.exit(main())
