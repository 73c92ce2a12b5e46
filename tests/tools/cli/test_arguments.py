"""Arguments of the command line: they are read without torch, and what they say of other modules is so."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.static_scales.measure.calibrate import NAMES
from kvcompile.extensions.static_scales.scales import ScaleExtent
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.report import Pass
from kvcompile.settings import Inner
from kvcompile.tools.cli import arguments
from kvcompile.tools.cli.dump import DumpStage
from kvcompile.tools.cli.targets import CacheKind
from kvcompile.tools.evaluation.tasks import TASKS
from kvcompile.tools.planner.engines import Engine
from kvcompile.tools.planner.recommend import Generation

ROOT = Path(__file__).parents[3]


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands by name."""
    (found,) = (item for item in arguments.parser()._actions if isinstance(item, argparse._SubParsersAction))
    return dict(found.choices)


LOOK = """
import sys
from kvcompile.tools.cli.main import main
sys.argv[0] = "kvcompile"
try:
    main({given!r})
except SystemExit as done:
    print("status", done.code)
print("torch" in sys.modules, "kvcompile.tools.cli.arguments" in sys.modules)
"""


@pytest.mark.parametrize(
    ("given", "status"), [(["--help"], 0), (["plan", "--help"], 0), (["eval", "--no-such"], 2), (["explain"], 2), (["nothing"], 2)], ids=str
)
def test_help_and_wrong_options_cost_no_torch(given: list[str], status: int) -> None:
    text = f"import sys; sys.argv[0] = 'kvcompile'\n{LOOK.format(given=given)}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines()[-2:] == [f"status {status}", "False True"], done.stderr


def test_the_module_is_the_command_and_costs_no_torch_either() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvcompile", "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "kvcompile.tools.cli.arguments" in loaded and "torch" not in loaded
    assert all(name in done.stdout for name in commands())


@pytest.mark.parametrize("name", commands())
def test_the_place_that_runs_a_command_is_there(name: str) -> None:
    module, _, function = commands()[name].get_default("run").partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_choices_and_defaults_are_those_of_the_modules_that_take_them() -> None:
    enums = {
        arguments.CACHES: CacheKind, arguments.INNER: Inner, arguments.STAGES: DumpStage, arguments.VARIANTS: Variant,
        arguments.EXTENTS: ScaleExtent, arguments.GENERATIONS: Generation, arguments.PASSES: Pass,
        arguments.ENGINES: Engine,
    }
    for given, members in enums.items():
        assert given == tuple(item.value for item in members)
    assert tuple(TASKS) == arguments.TASKS and NAMES == arguments.CODES
    defaults = LearnSettings()
    assert (defaults.steps, defaults.batch, defaults.rate) == (arguments.STEPS, arguments.BATCH, arguments.RATE)
