"""One table of all schemes, from one run: steps of the 8B shape behind compiled prompts, peak memory, cold and warm starts.

    python benchmarks/one_table.py --json FILE [--seconds 1100] [--schemes "dense;int8;int4"] [--gpus 0,1] [--lanes 2]

A scheme is a process of ``step.py`` for one row of 32K and of 128K tokens, one for eight rows of 32K, and one of ``startup.py`` beside
them; each has caches of its own on disk. A GPU has ``--lanes`` places; eight rows, and schemes that keep originals, take all of them.
Processes of one GPU take turns to be timed. Nothing is begun that has no time to end in ``--seconds``, and what FILE holds already is not
measured again, so that several runs make one table; each row names its run, and each run its machine. Prints it as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvcompile.tools.evaluation.machine import machine

HERE = Path(__file__).resolve().parent
SCHEMES = (
    "dense", "int4", "int8", "kivi", "smartkv(budget=0.281)", "beyond", "nf4", "squat", "normed", "fp8", "certified", "int4(rotate=kv)",
    "kivi(rotate=k)", "int4(sinks=8)",
)
STOCK = "stock"
STARTS = 2
"""Cold and warm starts side by side: they need cores, and little of a GPU."""


class Kind(enum.Enum):
    """The kind of a measurement. The value lists the shapes that ``step.py`` times; ``START`` runs ``startup.py``, which has no shapes."""

    NARROW = "1x32768,1x131072"
    WIDE = "8x32768"
    START = ""

    @property
    def least(self) -> float:
        """Seconds that a process of the kind takes at least, on a GPU of its own."""
        return {Kind.NARROW: 170.0, Kind.WIDE: 120.0, Kind.START: 80.0}[self]


@dataclasses.dataclass(frozen=True)
class Job:
    """One process: a scheme and what is measured of it."""

    scheme: str
    kind: Kind

    @property
    def name(self) -> str:
        """A name for files."""
        return "".join(filter(str.isalnum, f"{self.scheme}{self.kind.name.lower()}"))

    def lanes(self, lanes: int) -> int:
        """Places of a GPU that it takes, of ``lanes``."""
        if self.kind is Kind.START:
            return 0
        return lanes if self.kind is Kind.WIDE or self.scheme.startswith("certified") else 1

    def command(self, into: Path, turns: Path) -> list[str]:
        """The command line, which writes rows to ``into``."""
        if self.kind is Kind.START:
            return [sys.executable, str(HERE / "startup.py"), "--kinds", self.scheme, "--rounds", "1", "--json", str(into)]
        more = ["--warm", "150", "--windows", "8"] if self.scheme.startswith("smartkv") else ["--windows", "4"]
        return [
            sys.executable, str(HERE / "step.py"), "--no-gate", "--prompt", "compiled", "--steps", "20", *more, "--turns", str(turns),
            "--configurations", f"{self.scheme}:reduce-overhead", "--shapes", self.kind.value, "--json", str(into),
        ]


@dataclasses.dataclass
class Running:
    """A process, the GPU that it is on, and where its rows go."""

    job: Job
    gpu: int
    into: Path
    process: subprocess.Popen[bytes]


def jobs_of(schemes: Sequence[str], held: dict[str, Any]) -> list[Job]:
    """The jobs whose rows ``held`` lacks, in the order in which they start."""
    wanted = [Job(STOCK, Kind.START)]
    wanted += [Job(scheme, kind) for kind in (Kind.NARROW, Kind.WIDE, Kind.START) for scheme in schemes]
    return [job for job in wanted if job.name not in held or len(held[job.name]) < len(job.kind.value.split(","))]


def place(job: Job, running: Sequence[Running], gpus: Sequence[int], lanes: int) -> int | None:
    """The GPU with the most free places that has those of a job; None where it must wait."""
    if job.kind is Kind.START:
        return gpus[-1] if sum(item.job.kind is Kind.START for item in running) < STARTS else None
    free = {gpu: lanes - sum(item.job.lanes(lanes) for item in running if item.gpu == gpu) for gpu in gpus}
    best = max(gpus, key=lambda gpu: free[gpu])
    return best if free[best] >= job.lanes(lanes) else None


class Run:
    """Processes side by side until all is measured or the time is over."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.begun = options, folder, time.monotonic()
        path = options.json
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": {}}
        self.content["runs"].append({
            "command": " ".join(sys.argv[1:]), "date": dt.date.today().isoformat(),
            "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        })
        self.running: list[Running] = []

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float(self.options.seconds - (time.monotonic() - self.begun))

    def begin(self, job: Job, gpu: int) -> None:
        """Start a process with caches of its own."""
        into = self.folder / f"{job.name}.json"
        own = {
            "CUDA_VISIBLE_DEVICES": str(gpu), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / job.name / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / job.name / "triton"), "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1",
        }
        command = job.command(into, self.folder / f"turns{gpu}")
        with (self.folder / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.running.append(Running(job, gpu, into, process))

    def take(self, item: Running) -> None:
        """Keep the rows of a process that has ended, and what it said last where it has none."""
        found = json.loads(item.into.read_text()) if item.into.exists() else []
        rows = [row | {"gpu": item.gpu, "run": len(self.content["runs"]) - 1} for row in found]
        if rows:
            self.content["rows"][item.job.name] = rows
        else:
            last = (self.folder / f"{item.job.name}.log").read_text(errors="replace")[-400:]
            what = f"{item.job.scheme}, {item.job.kind.name.lower()}"
            print(f"{what}: nothing measured, status {item.process.returncode}: {last}", flush=True)
        self.options.json.write_text(json.dumps(self.content, indent=1) + "\n")

    def go(self) -> None:
        """Measure what is left; whoever interrupts it gets what was measured until then."""
        with contextlib.suppress(KeyboardInterrupt):
            self._measure(jobs_of(self.options.schemes.split(";"), self.content["rows"]))
        for item in self.running:
            os.killpg(item.process.pid, signal.SIGINT)
        for item in self.running:
            try:
                item.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(item.process.pid, signal.SIGKILL)
                item.process.wait()
            self.take(item)

    def _measure(self, waiting: list[Job]) -> None:
        """Begin jobs where there is room and keep the rows of those that end, until none is left or the time is over."""
        while (waiting or self.running) and self.left > 0:
            for item in [item for item in self.running if item.process.poll() is not None]:
                self.running.remove(item)
                self.take(item)
            waiting = [job for job in waiting if job.kind.least < self.left]
            for job in list(waiting):
                gpu = place(job, self.running, self.options.gpus, self.options.lanes)
                if gpu is not None:
                    waiting.remove(job)
                    self.begin(job, gpu)
            time.sleep(0.2)


def table(rows: dict[str, list[dict[str, Any]]], schemes: Sequence[str]) -> str:
    """A line a scheme: ms a step (the least median of its windows) and peak GB of each shape, seconds of a cold and of a warm start."""
    shapes = [shape for kind in (Kind.NARROW, Kind.WIDE) for shape in kind.value.split(",")]
    lines = [f"| | {' | '.join(f'{shape}: ms, GB' for shape in shapes)} | cold, warm: s |", "|---|" + "---|" * (len(shapes) + 1)]
    for scheme in (STOCK, *schemes):
        found = {
            f"{row['batch']}x{row['context']}": f"{row['ms']:.1f}, {row['peak_gb']:.1f}"
            for kind in (Kind.NARROW, Kind.WIDE) for row in rows.get(Job(scheme, kind).name, ())
        }
        start = rows.get(Job(scheme, Kind.START).name)
        starts = f"{start[0]['cold'][-1]:.0f}, {start[0]['warm_s']:.0f}" if start else ""
        lines.append(f"| `{scheme}` | {' | '.join(found.get(shape, '') for shape in shapes)} | {starts} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="separated by semicolons, the most wanted first")
    parser.add_argument("--seconds", type=float, default=1100)
    parser.add_argument("--gpus", type=lambda text: tuple(map(int, text.split(","))), default=(0,), help="the numbers of cards")
    parser.add_argument("--lanes", type=int, default=2, help="processes of one row side by side on a GPU; one takes up to 45 GB")
    parser.add_argument("--logs", type=Path, help="a folder for logs and caches (default: one that is removed)")
    options = parser.parse_args(argv)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        run = Run(options, options.logs or Path(name))
        run.go()
    print(table(run.content["rows"], options.schemes.split(";")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
