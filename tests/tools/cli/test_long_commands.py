"""Long commands: what they show in a pipe, what Ctrl-C leaves, and who may read the files that they write."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.files.tensor_file import follow_umask
from kvcompile.progress import PERIOD, ProgressLine
from kvcompile.schemes.model_file import ModelFile
from kvcompile.tools.cli import evaluate, survey_command
from kvcompile.tools.cli.main import main
from kvcompile.tools.evaluation.measures import Measured
from kvcompile.tools.planner import sensitivity

ROOT = Path(__file__).parents[3]


# --- progress ---------------------------------------------------------------------------------------------


def test_a_pipe_gets_a_line_at_least_every_ten_seconds() -> None:
    assert PERIOD <= 10 / 2, "a busy machine delays a line"
    stream = io.StringIO()
    with ProgressLine("eval", 4, stream=stream, period=0.05) as progress:
        progress.at("int8", 1)
        time.sleep(0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3 and all(re.fullmatch(r"eval: 1 of 4, int8, \d+ s", line) for line in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcompile progress"]


def test_what_ends_at_once_shows_nothing_and_quiet_never_does() -> None:
    short, quiet = io.StringIO(), io.StringIO()
    with ProgressLine("plan", stream=short):
        pass
    with ProgressLine("plan", stream=quiet, period=0.01, quiet=True):
        time.sleep(0.1)
    assert short.getvalue() == quiet.getvalue() == ""


def test_a_reader_that_went_does_not_end_the_work() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with ProgressLine("plan", stream=Closed(), period=0.01) as progress:
        time.sleep(0.1)
        progress.at("still here")


# --- Ctrl-C -----------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """While the model is built, as a user would press it."""
    (tmp_path / "slow.py").write_text("import time\ndef make():\n    print('here', flush=True)\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "kvcompile", "explain", f"{tmp_path}/slow.py:make"]
    # Shells start what runs in the background with this signal ignored, and children inherit that.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)  # noqa: PLW1509
    assert running.stdout is not None
    assert running.stdout.readline() == "here\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in err and err.splitlines()[-1] == "kvcompile: stopped"


SMALL = ["--quick", "--lengths", "200", "--questions", "1", "--tail", "2", "--tasks", "needle", "--schemes", "dense,int8,int4"]


def interrupted_after(count: int, found: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def stopping(*given: Any) -> Iterator[Any]:
        for number, item in enumerate(found(*given)):
            if number == count:
                raise KeyboardInterrupt
            yield item

    return stopping


def test_eval_keeps_the_schemes_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_dynamo: None
) -> None:
    monkeypatch.setattr(evaluate, "measured", interrupted_after(1, evaluate.measured))
    assert main(["eval", *SMALL, "--json", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 130
    shown = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [item["scheme"] for item in shown["schemes"]] == [item["scheme"] for item in kept["schemes"]] == ["dense"]


def test_eval_with_nothing_done_is_stopped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_dynamo: None) -> None:
    monkeypatch.setattr(evaluate, "measured", interrupted_after(0, lambda *given: iter([Measured("dense")])))
    assert main(["eval", *SMALL, "--device", "cpu"]) == 130
    caught = capsys.readouterr()
    assert caught.err.endswith("kvcompile: stopped\n") and not caught.out


def test_sensitivity_keeps_the_damages_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_dynamo: None
) -> None:
    kls = iter([0.0, 0.1, 0.2])

    def kl(self: Any, policy: object, validate: bool = True) -> float:
        found = next(kls, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(sensitivity.Trial, "kl", kl)
    file = tmp_path / "damages.json"
    asked = ["--schemes", "int8", "--context", "32", "--steps", "2", "--rows", "1", "--device", "cpu"]
    assert main(["sensitivity", *asked, "-o", str(file), "--memory", "1", "--json"]) == 130
    shown = json.loads(capsys.readouterr().out)
    assert [item["kl"] for item in shown["damages"]] == [0.1, 0.2] and "fit" not in shown
    assert len(sensitivity.Sensitivity.load(file).damages) == 2


def test_survey_shows_the_architectures_that_are_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(survey_command, "conduct", interrupted_after(0, lambda survey, started: iter([[]])))
    assert main(["survey", "--archs", "llama", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == []


# --- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_with_group() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o640
    os.umask(before)


def test_files_of_tensors_follow_the_umask(tmp_path: Path, shared_with_group: int) -> None:
    """Safetensors writes files that their owner alone may read."""
    ModelFile("a mark", "numbers", ValueError, "").write(tmp_path / "new.safetensors", {"x": torch.zeros(2)}, {})  # type: ignore[arg-type]
    assert (tmp_path / "new.safetensors").stat().st_mode & 0o777 == shared_with_group
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]
    (tmp_path / "own").touch(mode=0o600)
    follow_umask(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == shared_with_group


# --- survey -----------------------------------------------------------------------------------------------


def test_survey_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(survey_command.importlib.util, "find_spec", lambda name: None)
    assert main(["survey", "--archs", "llama"]) == 2
    assert "pip install 'kvcompile[hf]'" in capsys.readouterr().err
