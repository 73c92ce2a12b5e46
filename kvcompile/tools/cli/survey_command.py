"""``kvcompile survey``: tries architectures of transformers one by one, and prints and writes the outcomes."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from kvcompile.errors import FileUnfit, TargetError
from kvcompile.passes.plan.policy import policy_of
from kvcompile.tools.cli.architectures import names
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.survey import Survey, conduct, read_cases, untried
from kvcompile.tools.cli.survey_table import about, as_csv, survey_table
from kvcompile.tools.cli.trial import TrialSettings


def run(arguments: argparse.Namespace) -> int:
    """Try the requested architectures that are not known yet, and print the table."""
    known = names()
    strange = sorted(set(arguments.archs) - set(known))
    if strange:
        near = " or ".join(difflib.get_close_matches(strange[0], known, n=3))
        raise TargetError(found=strange[0], why="transformers has no such architecture" + (f", did you mean {near}?" if near else ""))
    policy_of(arguments.scheme)
    settings = TrialSettings(arguments.scheme, tuple(int(item) for item in arguments.rows), steps=arguments.steps, layers=arguments.layers)
    done = [case for path in arguments.known for case in _known_cases(path)]
    waiting = untried(arguments.archs or known, arguments.caches, arguments.attention, done)
    survey = Survey(waiting, tuple(arguments.caches), tuple(arguments.attention), settings, arguments.timeout, arguments.jobs)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("survey", total=len(survey.architectures))
        for cases in conduct(survey, lambda name: progress.update(task, description=name)):
            done += cases
            progress.advance(task)
            if arguments.json is not None:
                # Written after each architecture, so that stopping the command keeps the results so far.
                arguments.json.write_text(json.dumps([case.plain() for case in done], indent=1) + "\n")
    console().print(survey_table(done))
    if arguments.csv is not None:
        arguments.csv.write_text(as_csv(done))
        console().print(about(survey))
    return 0


def _known_cases(path: str) -> list[Any]:
    try:
        return read_cases(Path(path))
    except FileUnfit as error:
        raise TargetError(found=path, why=f"it is no JSON of an earlier survey: {error.fact}") from error
