"""``kvcompile sensitivity``: measures how much each layer's keys and values lose under a scheme, and fits a policy to a budget of bytes.

    kvcompile sensitivity -o tinylm.json
    kvcompile sensitivity smollm2 --schemes kivi,squat,int4 -o smollm2.json
    kvcompile sensitivity ./checkpoint --text some.txt --schemes 'int8,int4,kivi(bits=4)' -o checkpoint.json --memory 2 --fit-context 32768
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcompile.progress import ProgressLine
from kvcompile.report import short_scheme
from kvcompile.schemes import parse
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.interrupt import INTERRUPTED
from kvcompile.tools.cli.plan_target import ODD
from kvcompile.tools.cli.subjects import named
from kvcompile.tools.cli.targets import static_cache
from kvcompile.tools.planner.fitting import Fitted, fitted
from kvcompile.tools.planner.model import traced
from kvcompile.tools.planner.sensitivity import Layer, Sensitivity, Trial, layers_of, measured


@dataclass(frozen=True)
class DecodingSubject:
    """A model with its name, its layers, and the trial that decodes tokens with it."""

    name: str
    trial: Trial
    layers: tuple[Layer, ...]


def run(arguments: argparse.Namespace) -> int:
    """Measure (or read) the damages, write and print them, and fit a policy if a memory budget is given.

    Returns the exit status, INTERRUPTED after Ctrl-C; then no policy is fitted. Raises a SchemeError for an unknown scheme, TargetError for
    a target that names no model, SensitivityUnread and BudgetTooSmall.
    """
    names = [short_scheme(parse(item)) for item in arguments.schemes]
    known = None if arguments.read is None else Sensitivity.load(arguments.read)
    with ProgressLine("sensitivity") as progress:
        progress.at("loading the model")
        subject = _subject_of(arguments)
    stopped = False
    if known is None:
        known, stopped = _measured(subject, names)
    if arguments.output is not None:
        known.save(arguments.output)
    shown = console()
    if not arguments.json:
        shown.print(table(known))
    made = known.plain()
    if arguments.memory is not None and not stopped:
        tokens = arguments.fit_context or known.prompt + known.steps
        found = fitted(known, arguments.memory, tokens, arguments.fit_batch)
        with ProgressLine("sensitivity") as progress:
            progress.at("measuring the policy")
            kl = subject.trial.kl(found.policy)
        made["fit"] = fit_json(found, kl, tokens, arguments.fit_batch)
        if not arguments.json:
            shown.print(fit_text(found, kl, tokens, arguments.fit_batch))
    if arguments.json:
        shown.file.write(json.dumps(made, indent=2) + "\n")
    return INTERRUPTED if stopped else 0


def _measured(subject: DecodingSubject, names: list[str]) -> tuple[Sensitivity, bool]:
    """Return (the damages, whether Ctrl-C ended the measurement before all of them were known)."""
    count = len(names) * sum(len(layer.halves) for layer in subject.layers)
    with ProgressLine("sensitivity", count) as progress:
        progress.at("all layers as they are")
        found = measured(subject.name, subject.trial, subject.layers, names, lambda what: progress.at(what, progress.done + 1))
    return found, progress.done < count


def _subject_of(arguments: argparse.Namespace) -> DecodingSubject:
    """Return the model of the command's target with its layers and texts; prompts begin with its start tokens. Raises TargetError."""
    found = named(arguments.target, [] if arguments.text is None else [arguments.text], arguments.device)
    ids = found.texts(arguments.context, arguments.steps, arguments.rows)
    return _subject(found.name, found.model, ids, len(found.start) + arguments.context)


def _subject(name: str, model: Any, ids: torch.Tensor, prompt: int) -> DecodingSubject:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0)
    capacity = max(ids.shape[1], longest if isinstance(longest, int) else 0) + ODD
    inputs = {"input_ids": ids[:1, :prompt], "past_key_values": static_cache(model, capacity), "use_cache": True}
    with torch.no_grad():
        layers = layers_of(traced(name, model, inputs, capacity))
    return DecodingSubject(name, Trial(model, ids, prompt, lambda: static_cache(model, ids.shape[1])), layers)


def table(known: Sensitivity) -> Table:
    """Return a table of the KL of every scheme in each layer's keys and values, with sums over layers."""
    schemes = list(dict.fromkeys(item.scheme for item in known.damages))
    halves = list(dict.fromkeys(half for layer in known.layers for half in layer.halves))
    made = Table(
        title=f"{known.model}: KL in nats a token, the keys or the values of one layer stored in a scheme",
        title_justify="left", title_style="bold",
        caption=f"{known.rows} texts, prompts of {known.prompt:,} tokens, {known.steps} predictions each; no layer compressed: "
        f"{known.floor:.1e}", caption_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
    )
    made.add_column("layer")
    for scheme in schemes:
        for half in halves:
            made.add_column(f"{escape(scheme)}\n{half.value}", justify="right")
    for layer in known.layers:
        cells = [known.of(layer.path, half).get(scheme) for scheme in schemes for half in halves]
        made.add_row(layer.path, *("" if kl is None else f"{kl:.1e}" for kl in cells))
    sums = [
        sum(known.of(layer.path, half).get(scheme, 0.0) for layer in known.layers) for scheme in schemes for half in halves
    ]
    made.add_row("sum", *(f"{total:.1e}" for total in sums), style="bold")
    return made


def fit_json(found: Fitted, kl: float, tokens: int, batch: int) -> dict[str, Any]:
    """Return a fitted policy as plain data."""
    policy = {path: {"k": short_scheme(pair.k), "v": short_scheme(pair.v)} for path, pair in found.policy.pairs}
    return {"bytes": found.nbytes, "batch": batch, "context": tokens, "kl_by_sum": found.damage, "kl_measured": kl, "policy": policy}


def fit_text(found: Fitted, kl: float, tokens: int, batch: int) -> Text:
    """Return a fitted policy as text: its bytes, the sum of its parts' damages, and the measured damage."""
    sums = f"KL {found.damage:.2e} by the sum, {kl:.2e} measured"
    text = Text(f"{found.nbytes:,} bytes for {batch} x {tokens:,} tokens; {sums}", style="bold")
    for path, pair in found.policy.pairs:
        text.append(f"\n  {path}: keys {short_scheme(pair.k)}, values {short_scheme(pair.v)}", style="not bold")
    return text
