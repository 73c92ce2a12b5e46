"""``kvcompile explain`` and ``kvcompile dump``: run a target once under a backend and print its report or its graphs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings

import torch
from rich.console import Console
from rich.syntax import Syntax

from kvcompile.backend import Backend, backend
from kvcompile.errors import KvcompileError, TargetError
from kvcompile.explain import described, observe
from kvcompile.passes.plan.policy import policy_of
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.progress import ProgressLine
from kvcompile.report import Pass, Report
from kvcompile.report.notices import notices
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.targets import CacheKind, Target, TargetOptions, resolve

log = logging.getLogger(__name__)


def explain(arguments: argparse.Namespace) -> int:
    """Print the report of a target, write it as a page, or print one pass. Returns 1 if ``--strict`` and a site was refused, else 0."""
    owner = _observed(arguments)
    report = described(owner, arguments.tokens)
    if arguments.stage is not None:
        _show_pass(owner, report, arguments)
    elif arguments.html is not None:
        arguments.html.write_text(report.html(), encoding="utf-8")
        Console(stderr=True).print(f"{arguments.html}: {notices(report)[0].text}", highlight=False, soft_wrap=True)
    elif arguments.json:
        console().file.write(json.dumps(report.plain(), indent=2) + "\n")
    else:
        console().print(report)
    return int(arguments.strict and bool(report.refusals))


def _show_pass(owner: Backend, report: Report, arguments: argparse.Namespace) -> None:
    """Print the seconds of every pass (``--stage list``), or a graph in its state after one pass."""
    from kvcompile.tools.cli.passes import pass_table, pass_text

    if arguments.stage == "list":
        console().print(pass_table(report))
        return
    asked = Pass(arguments.stage)
    text = pass_text(owner, asked, arguments.graph)
    if sys.stdout.isatty():
        language = "text" if asked in {Pass.MATCH, Pass.PLAN, Pass.VALIDATE} else "python"
        Console().print(Syntax(text, language, theme="ansi_dark", word_wrap=True))
    else:
        sys.stdout.write(text)


def dump(arguments: argparse.Namespace) -> int:
    """Print a graph of a target, or write it to a file; return the exit status, 0."""
    from kvcompile.tools.cli.dump import LANGUAGES, Dump, DumpStage

    stage = DumpStage(arguments.stage)
    owner = _observed(arguments)
    text = Dump(owner, arguments.graph, Variant(arguments.variant) if arguments.variant else None).text(stage, arguments.arch)
    if arguments.output is not None:
        arguments.output.write_text(text)
        Console(stderr=True).print(f"{arguments.output}: {stage.value}, {len(text.splitlines()):,} lines", highlight=False)
    elif sys.stdout.isatty():
        Console().print(Syntax(text, LANGUAGES.get(stage, "python"), theme="ansi_dark", word_wrap=True))
    else:
        sys.stdout.write(text)
    return 0


def _policy(arguments: argparse.Namespace) -> object:
    """Return the policy that the scheme arguments name; called before a model is built. Raises a SchemeError if they name no scheme."""
    pair: object = arguments.scheme
    if arguments.key_scheme or arguments.value_scheme:
        pair = {"k": arguments.key_scheme or arguments.scheme, "v": arguments.value_scheme or arguments.scheme}
    layers = {glob: None if scheme == "none" else scheme for glob, _, scheme in (item.partition("=") for item in arguments.layer)}
    return policy_of({"*": pair, **layers} if layers else pair)


def _observed(arguments: argparse.Namespace) -> Backend:
    """Run the target once and return the backend with the records of its graphs. Raises TargetError."""
    policy = _policy(arguments)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    options = TargetOptions(CacheKind(arguments.cache), arguments.attention, dtype, arguments.device)
    owner = backend(policy, inner="eager")
    with ProgressLine(arguments.target) as progress:
        progress.at("building the model")
        target = resolve(arguments.target, options)
        progress.at("compiling its graphs")
        _run(target, owner)
    if not owner.graphs:
        raise TargetError(found=arguments.target, why="calling it compiled no graph: it runs no tensor code that Dynamo can see")
    return owner


def _run(target: Target, owner: Backend) -> None:
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # Dynamo's advice about the model's code would interrupt the output.
            warnings.simplefilter("ignore")
            observe(target.model, target.inputs, owner)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, KvcompileError):
            raise inner from error
        log.debug("the target failed", exc_info=True)
        message = str(inner).strip().splitlines()
        why = f"calling it raised {type(inner).__name__}: {message[0] if message else 'no message'}"
        raise TargetError(found=target.name, why=why) from error
