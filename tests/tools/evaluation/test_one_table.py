"""The run of all schemes: what runs side by side, what is kept, what is not measured again, and what is not begun."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from benchmarks import one_table
from benchmarks.one_table import Job, Kind, Running, jobs_of, main, place

ROW = {"batch": 1, "context": 32768, "ms": 8.25, "peak_gb": 17.31}


def running(*jobs: tuple[Job, int]) -> list[Running]:
    return [Running(job, gpu, Path(), None) for job, gpu in jobs]  # type: ignore[arg-type]


def test_eight_rows_have_a_gpu_to_themselves() -> None:
    narrow, wide, start = (Job("int4", kind) for kind in (Kind.NARROW, Kind.WIDE, Kind.START))
    assert place(narrow, running((narrow, 0)), gpus=(0,), lanes=2) == 0
    assert place(wide, running((narrow, 0)), gpus=(0,), lanes=2) is None
    assert place(wide, running((narrow, 0)), gpus=(0, 1), lanes=2) == 1
    assert place(narrow, running((wide, 0)), gpus=(0,), lanes=2) is None
    assert place(Job("certified", Kind.NARROW), running((narrow, 0)), gpus=(0,), lanes=2) is None
    assert place(start, running((wide, 0), (start, 0)), gpus=(0,), lanes=2) == 0
    assert place(start, running((start, 0), (start, 0)), gpus=(0,), lanes=2) is None


def test_what_is_held_is_not_measured_again() -> None:
    half = {"int4narrow": [ROW], "int4wide": [ROW], "stockstart": [{}]}
    assert jobs_of(["int4"], half) == [Job("int4", Kind.NARROW), Job("int4", Kind.START)]


def test_rows_are_kept_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(job: Job, into: Path, turns: Path) -> list[str]:
        """A process that writes what the real one does; ``broken`` fails, its starts never end by themselves."""
        rows = {Kind.START: [{"cold": [60.2], "warm_s": 14.7}], Kind.NARROW: [ROW], Kind.WIDE: [ROW | {"batch": 8, "ms": 11.4}]}[job.kind]
        code = f"import json, pathlib, time; pathlib.Path({str(into)!r}).write_text(json.dumps({rows!r}))"
        if job.scheme == "broken":
            waits = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(600)"
            code = waits if job.kind is Kind.START else "raise SystemExit('no such scheme')"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(Job, "command", command)
    monkeypatch.setattr(Kind, "least", 0.0)
    path = tmp_path / "table.json"
    assert main(["--json", str(path), "--schemes", "int4;broken", "--seconds", "6"]) == 0
    said = capsys.readouterr().out
    assert "| `int4` | 8.2, 17.3 |  | 11.4, 17.3 | 60, 15 |" in said
    assert "broken, narrow: nothing measured, status 1: no such scheme" in said
    assert "broken, start: nothing measured, status -2" in said
    held = json.loads(path.read_text())["rows"]
    assert set(held) == {"stockstart", "int4narrow", "int4wide", "int4start"}
    runs = json.loads(path.read_text())["runs"]
    assert [row["run"] for rows in held.values() for row in rows] == [0] * 4
    assert "torch" in runs[0]["machine"]["versions"]
    waits = itertools.count()

    def interrupted(_: float) -> None:
        if next(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(one_table.time, "sleep", interrupted)
    assert main(["--json", str(path), "--schemes", "int4;broken", "--seconds", "600"]) == 0
    assert "nothing measured" in capsys.readouterr().out, "what runs is ended, what is held is printed"
    monkeypatch.undo()
    monkeypatch.setattr(Kind, "least", 1e9)
    assert main(["--json", str(path), "--schemes", "int4;fp8", "--seconds", "6"]) == 0
    assert set(json.loads(path.read_text())["rows"]) == set(held), "nothing is begun that has no time to end"
