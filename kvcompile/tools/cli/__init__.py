"""The command line: explain, dump, bench, plan, sensitivity, schemes, eval, survey. Reads and prints; what it shows is made elsewhere.

    kvcompile explain hf:llama --scheme int4
    kvcompile dump model.py:make --scheme int8 --stage rewritten
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.syntax import Syntax

from kvcompile.backend import Backend, backend
from kvcompile.errors import FileUnfit, KvcompileError, TargetError
from kvcompile.explain import described, observe
from kvcompile.passes.plan.policy import policy_of
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.tools.cli import bench, calibrate, evaluate, learn, plan, sensitivity
from kvcompile.tools.cli.scheme_table import scheme_table
from kvcompile.tools.cli.targets import CacheKind, Options, Target, resolve

log = logging.getLogger(__name__)

PIPED_WIDTH = 120
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TARGET_HELP = "hf:TYPE (a tiny random model of any transformers type), a local checkpoint folder, or file.py:factory"
STAGES = ("captured", "normalised", "rewritten", "inductor", "triton", "ptx", "sass")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for refusals under --strict, 2 for errors."""
    arguments = _parser().parse_args(argv)
    package = logging.getLogger("kvcompile")
    level = package.level
    if level == logging.NOTSET:
        # What the backend warns of stands in the report.
        package.setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments))
    except KvcompileError as error:
        Console(stderr=True).print(f"kvcompile: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`| head`); what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        package.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvcompile", description="Compile models to attend over a compressed KV cache, and see how.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="which attentions would be rewritten, how, and why not")
    _target_options(explain)
    explain.add_argument("--tokens", type=_count, default=4096, help="context length that bytes are given for (default 4096)")
    explain.add_argument("--strict", action="store_true", help="exit with status 1 if any attention is refused")
    explain.set_defaults(run=_explain)
    dump = commands.add_parser("dump", help="one graph at any stage: as captured, matched, rewritten, generated, compiled")
    _target_options(dump)
    dump.add_argument("--stage", choices=STAGES, required=True, help="what to show")
    dump.add_argument("--graph", type=int, help="which graph, as explain numbers them (default: the last one with an attention)")
    dump.add_argument("--variant", choices=[item.value for item in Variant], help="over a filled cache (past) or into an empty one (fresh)")
    dump.add_argument("--arch", default="sm_90", help="GPU architecture for triton, ptx and sass: sm_80, sm_90 or sm_100 (default sm_90)")
    dump.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to a file")
    dump.set_defaults(run=_dump)
    bench.add(commands)
    plan.add(commands, DTYPES, _split)
    sensitivity.add(commands, _split)
    learn.add(commands)
    calibrate.add(commands)
    schemes = commands.add_parser("schemes", help="all schemes with their options and bytes")
    schemes.add_argument("--heads", type=_count, default=8, help="kv heads (default 8)")
    schemes.add_argument("--head-dim", type=_count, default=128, help="channels a head (default 128)")
    schemes.add_argument("--layers", type=_count, default=32, help="layers (default 32)")
    schemes.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the model's dtype (default bfloat16)")
    schemes.add_argument("--tokens", type=_count, default=131072, help="context length for the last column (default 131072)")
    schemes.set_defaults(run=_schemes)
    evaluate.add(commands, _split)
    _survey_parser(commands.add_parser("survey", help="which architectures of transformers are rewritten, and what their logits lose"))
    return parser


def _survey_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archs", type=_split, default=[], metavar="A,B", help="model types such as llama or bart+encoder (default: all)")
    parser.add_argument("--caches", type=_split, default=["static", "dynamic"], help="kinds of cache (default static,dynamic)")
    parser.add_argument("--attention", type=_split, default=["sdpa", "eager"], help="of transformers (default sdpa,eager)")
    parser.add_argument("--scheme", default="int8", help="tried beside dense (default int8)")
    parser.add_argument("--rows", type=_split, default=["1", "3"], help="batch sizes; more than one row is left padded (default 1,3)")
    parser.add_argument("--steps", type=_count, default=16, help="decode steps after the prompt (default 16)")
    parser.add_argument("--layers", type=_count, default=2, help="layers of each model, and one of each kind (default 2)")
    parser.add_argument("--jobs", type=_count, default=1, help="architectures at a time (default 1)")
    parser.add_argument("--timeout", type=_count, default=900, help="seconds for an architecture (default 900)")
    parser.add_argument("--known", type=_split, default=[], metavar="A,B", help="JSON of earlier runs, whose cases are not tried again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.set_defaults(run=_survey)


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--scheme", default="int8", help="for keys and values, such as int4 or 'int4(group=64)' (default int8)")
    parser.add_argument("--key-scheme", help="for keys, where they differ")
    parser.add_argument("--value-scheme", help="for values, where they differ")
    parser.add_argument(
        "--layer", action="append", default=[], metavar="GLOB=SCHEME",
        help="another scheme for these module paths, as 'model.layers.0.*=int8', or none to leave them out; may be repeated",
    )
    parser.add_argument("--cache", choices=[kind.value for kind in CacheKind], default="dynamic", help="of transformers (default dynamic)")
    parser.add_argument("--attention", help="transformers attention, such as sdpa or eager (default: the model's own)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: a checkpoint's own, bfloat16 for hf:")
    parser.add_argument("--device", default=_device(), help="cpu or cuda (default: cuda if there is one)")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def _console() -> Console:
    """Plain and wide where the output is not a terminal."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console()
    return Console(width=PIPED_WIDTH)


def _policy(arguments: argparse.Namespace) -> object:
    """Parse an argument into what ``backend(scheme=...)`` takes, before a model is built."""
    pair: object = arguments.scheme
    if arguments.key_scheme or arguments.value_scheme:
        pair = {"k": arguments.key_scheme or arguments.scheme, "v": arguments.value_scheme or arguments.scheme}
    layers = {glob: None if scheme == "none" else scheme for glob, _, scheme in (item.partition("=") for item in arguments.layer)}
    return policy_of({"*": pair, **layers} if layers else pair)


def _observed(arguments: argparse.Namespace) -> Backend:
    """The target, run once under a backend that keeps what every stage made."""
    policy = _policy(arguments)
    options = Options(CacheKind(arguments.cache), arguments.attention, DTYPES.get(arguments.dtype), arguments.device)
    target = resolve(arguments.target, options)
    owner = backend(policy, inner="eager")
    _run(target, owner)
    if not owner.graphs:
        raise TargetError(found=arguments.target, why="calling it compiled no graph: it runs no tensor code that Dynamo can see")
    return owner


def _run(target: Target, owner: Backend) -> None:
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # Dynamo's advice about the model's code would stand in the middle of the output.
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


def _explain(arguments: argparse.Namespace) -> int:
    report = described(_observed(arguments), arguments.tokens)
    _console().print(report)
    return int(arguments.strict and bool(report.refusals))


def _dump(arguments: argparse.Namespace) -> int:
    from kvcompile.tools.cli.dump import LANGUAGES, Dump, Stage

    stage = Stage(arguments.stage)
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


def _schemes(arguments: argparse.Namespace) -> int:
    table = scheme_table(arguments.heads, arguments.head_dim, arguments.layers, DTYPES[arguments.dtype], arguments.tokens)
    _console().print(table)
    return 0


def _survey(arguments: argparse.Namespace) -> int:
    from kvcompile.tools.cli.architectures import names
    from kvcompile.tools.cli.survey import Survey, conduct, untried
    from kvcompile.tools.cli.survey_table import markdown, survey_table
    from kvcompile.tools.cli.trial import Settings

    known = names()
    strange = sorted(set(arguments.archs) - set(known))
    if strange:
        near = " or ".join(difflib.get_close_matches(strange[0], known, n=3))
        raise TargetError(found=strange[0], why="transformers has no such architecture" + (f", did you mean {near}?" if near else ""))
    policy_of(arguments.scheme)
    settings = Settings(arguments.scheme, tuple(int(item) for item in arguments.rows), steps=arguments.steps, layers=arguments.layers)
    done = [case for path in arguments.known for case in _known_cases(path)]
    waiting = untried(arguments.archs or known, arguments.caches, arguments.attention, done)
    survey = Survey(waiting, tuple(arguments.caches), tuple(arguments.attention), settings, arguments.timeout, arguments.jobs)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("survey", total=len(survey.architectures))
        for cases in conduct(survey, lambda name: progress.update(task, description=name)):
            done += cases
            progress.advance(task)
            if arguments.json is not None:
                # After each architecture: what was measured stays even where the command is stopped.
                arguments.json.write_text(json.dumps([case.plain() for case in done], indent=1) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(done, survey))
    _console().print(survey_table(done))
    return 0


def _known_cases(path: str) -> list[Any]:
    from kvcompile.tools.cli.survey import read_cases

    try:
        return read_cases(Path(path))
    except FileUnfit as error:
        raise TargetError(found=path, why=f"it is no JSON of an earlier survey: {error.fact}") from error


def _split(text: str) -> list[str]:
    """``int8,int4(group=16,scale_dtype=float32)`` at the commas outside of parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
