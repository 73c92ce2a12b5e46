"""``kvcompile survey``: tries architectures of transformers one by one, and prints and writes the outcomes."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from kvcompile.errors import FileUnfit, NothingToMeasure, TargetError
from kvcompile.passes.plan.policy import policy_of
from kvcompile.progress import ProgressLine
from kvcompile.spelling import nearest
from kvcompile.tools.cli.architectures import names
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.interrupt import INTERRUPTED
from kvcompile.tools.cli.survey import Survey, conduct, read_cases, untried
from kvcompile.tools.cli.survey_table import about, as_csv, survey_table
from kvcompile.tools.cli.trial import TrialSettings


def run(arguments: argparse.Namespace) -> int:
    """Try the requested architectures, except those whose cases are all in ``--known`` files, and print the table; return the exit status.

    The status is 0, or INTERRUPTED after Ctrl-C. Raises NothingToMeasure without transformers, and TargetError for an architecture that
    transformers lacks.
    """
    if importlib.util.find_spec("transformers") is None:
        raise NothingToMeasure(
            expected="the architectures of transformers", found="that transformers is not installed", todo="pip install 'kvcompile[hf]'",
        )
    known = names()
    strange = sorted(set(arguments.archs) - set(known))
    if strange:
        near = " or ".join(nearest(strange[0], known, 3))
        raise TargetError(found=strange[0], why="transformers has no such architecture" + (f", did you mean {near}?" if near else ""))
    policy_of(arguments.scheme)
    settings = TrialSettings(arguments.scheme, tuple(int(item) for item in arguments.rows), steps=arguments.steps, layers=arguments.layers)
    done = [case for path in arguments.known for case in _known_cases(path)]
    waiting = untried(arguments.archs or known, arguments.caches, arguments.attention, done)
    survey = Survey(waiting, tuple(arguments.caches), tuple(arguments.attention), settings, arguments.timeout, arguments.jobs)
    count, stopped = 0, False
    with ProgressLine("survey", len(survey.architectures)) as progress:
        try:
            for cases in conduct(survey, progress.at):
                done += cases
                count += 1
                progress.at(progress.doing, count)
                if isinstance(arguments.json, Path):
                    # Written after each architecture, so that stopping the command keeps the results so far.
                    arguments.json.write_text(_as_json(done))
        except KeyboardInterrupt:
            stopped = True
    if arguments.json is True:
        console().file.write(_as_json(done))
    else:
        console().print(survey_table(done))
    if arguments.csv is not None:
        arguments.csv.write_text(as_csv(done))
        if arguments.json is not True:
            console().print(about(survey))
    return INTERRUPTED if stopped else 0


def _as_json(done: list[Any]) -> str:
    return json.dumps([case.plain() for case in done], indent=1) + "\n"


def _known_cases(path: str) -> list[Any]:
    try:
        return read_cases(Path(path))
    except FileUnfit as error:
        raise TargetError(found=path, why=f"it is no JSON of an earlier survey: {error.fact}") from error
