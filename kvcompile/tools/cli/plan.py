"""``kvcompile plan``: bytes of a model's cache under every scheme, what fits on a device, and a recommendation with its figures.

    kvcompile plan config.json --gpu-memory 80 --context 4096 --batch 16 --weights int4
    kvcompile plan config.json --gpu-memory 80 --engine vllm
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvcompile.errors import TargetError
from kvcompile.passes.plan.policy import Policy, policy_of
from kvcompile.progress import ProgressLine
from kvcompile.report import short_text
from kvcompile.schemes import registered, settings
from kvcompile.tools.cli import plan_engine
from kvcompile.tools.cli.arguments import GB, gigabytes
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.plan_answer import answer, lighter, memory_line, paste, presets
from kvcompile.tools.cli.plan_target import model_of
from kvcompile.tools.planner.capacity import MOST_TOKENS, Demand
from kvcompile.tools.planner.figures import figures
from kvcompile.tools.planner.model import Model
from kvcompile.tools.planner.recommend import Generation, Option, Recommendation, recommend
from kvcompile.tools.planner.stores import StoragePurpose, page_symbol
from kvcompile.tools.planner.weights import WeightFormat

UNCOUNTED = (
    "not counted: the allocator's rounding, workspaces of kernels (split attention's partial sums), CUDA graphs' pools, a compiler's memory"
)


def run(arguments: argparse.Namespace) -> int:
    """Trace the target, plan it under every scheme, and print the result; return the exit status, 0.

    Raises TargetError for a target that names no model, NotPlanned for one that cannot be traced, and a SchemeError for an unknown scheme.
    """
    wanted = _policies(arguments.schemes)
    prompt = min(arguments.prefill or arguments.context, arguments.context)
    with ProgressLine("plan") as progress:
        progress.at("reading the model's graphs")
        model = model_of(arguments.target, arguments.context, prompt, getattr(torch, arguments.dtype) if arguments.dtype else None)
    demand = Demand(
        arguments.gpu_memory, _weights(arguments.weights, model), arguments.overhead, arguments.batch, arguments.context, model.activations,
        arguments.prefill, arguments.prefill_rows,
    )
    known = figures()
    options = [Option.of(label, model.stores(policy, arguments.context), demand, known) for label, policy in wanted]
    if arguments.engine:
        plan_engine.show(arguments, model, demand, options)
        return 0
    found = recommend(options, demand, Generation(arguments.gpu), arguments.damage)
    shown = console()
    if arguments.json:
        shown.file.write(json.dumps(as_json(model, demand, options, found), indent=2) + "\n")
        return 0
    shown.print(answer(options, found, demand))
    shown.print(tables(model, demand, options, found))
    if arguments.symbolic:
        shown.print(formulas(options))
    if line := paste(options, found, demand):
        # Not folded: it is there to be copied.
        shown.print(Text(line, style="bold"), soft_wrap=True)
    return 0


def _policies(asked: Sequence[str]) -> list[tuple[str, Policy]]:
    """Return (label, policy) of the ``asked`` schemes, each once; raises a SchemeError for a text that names none.

    By default these are all schemes at their defaults, all named settings, and all settings with figures.
    """
    known = figures().labels
    own = settings()
    names = list(asked) or [*(kind.name for kind in registered()), *own, *known]
    # Keyed by options, as figures are; labelled by the setting's name if it has one.
    found: dict[str, tuple[str, Policy]] = {}
    for name in names:
        short = short_text(name)
        found.setdefault(short, (name if name in own and short not in known else short, policy_of(name)))
    return list(found.values())


def _weights(text: str, model: Model) -> int:
    """Return the bytes of a model's weights, from the name of a format or a number of GB. Raises TargetError."""
    try:
        return model.weights.nbytes(WeightFormat(text))
    except ValueError:
        pass
    try:
        return gigabytes(text)
    except argparse.ArgumentTypeError as error:
        listed = ", ".join(item.value for item in WeightFormat)
        raise TargetError(found=f"--weights {text}", why=f"it is none of {listed}, and no number of GB") from error


def as_json(model: Model, demand: Demand, options: Sequence[Option], found: Recommendation) -> dict[str, Any]:
    """Return all numbers of the tables as plain data, sizes in bytes."""
    rows = []
    for item in options:
        stores, batch, tokens = item.stores, demand.batch, demand.context
        rows.append({
            "scheme": item.label, "bytes_per_token": stores.bytes_per_token(tokens),
            "device_bytes_per_request": stores.device_bytes(1, tokens),
            "host_bytes_per_request": stores.host_bytes(1, tokens), "device_bytes": stores.device_bytes(batch, tokens),
            "host_bytes": stores.host_bytes(batch, tokens), "growing_bytes": stores.growing_bytes(batch, tokens),
            "needed_bytes": demand.needed(stores, batch, tokens), "dense_bytes": stores.dense_bytes(batch, tokens), "fits": item.fits,
            "largest_batch": item.largest_batch, "longest_context": item.longest_context,
            "shares": {
                share.name.lower() + ("_host" if host else ""): count for (share, host), count in stores.shares(batch, tokens).items()
            },
            "formula": str(stores.formula), "left_dense": [str(refusal) for refusal in stores.refusals],
        })
    return {
        "model": model.name, "slots": len(options[0].stores.stored) if options else 0, "batch": demand.batch, "context": demand.context,
        "memory_bytes": demand.memory, "weight_bytes": demand.weights, "overhead_bytes": demand.overhead,
        "activation_bytes": demand.beside(demand.context) - demand.weights - demand.overhead, "longest_trained": model.longest,
        "not_matched": [str(refusal) for refusal in model.observed.refusals], "schemes": rows,
        "recommended": found.scheme, "python": paste(options, found, demand), "lighter_weights": _lighter(model, demand, options, found),
        "most_requests": found.most_requests, "reasons": list(found.reasons), "uncounted": UNCOUNTED,
    }


def tables(model: Model, demand: Demand, options: Sequence[Option], found: Recommendation) -> RenderableType:
    """Return the plan as tables: one row per scheme, bytes by purpose, attentions left dense, and the recommendation."""
    head = Text(f"{model.name}: {len(options[0].stores.stored)} cache slots", style="bold")
    head.append(f"\n{memory_line(demand, 'the cache')}", style="not bold")
    parts: list[RenderableType] = [head, _main_table(demand, options), _share_table(demand, options)]
    left: dict[str, list[str]] = {}
    for item in options:
        for path, reason in sorted({(refusal.path, refusal.reason) for refusal in item.stores.refusals}):
            left.setdefault(reason, []).append(f"{path or 'an attention'} ({item.label})")
    parts += [Text(f"left dense: {places[0]} and {len(places) - 1} more: {reason}", style="yellow") for reason, places in left.items()]
    parts += [Text(f"refused, stays dense: {refusal}", style="yellow") for refusal in model.observed.refusals]
    if model.longest is not None and demand.context > model.longest:
        parts.append(Text(f"the model was made for {model.longest:,} positions, {demand.context:,} are asked for", style="yellow"))
    parts.append(_reasons(model, demand, options, found))
    parts.append(Text(UNCOUNTED, style="dim"))
    return Group(*parts)


def _rows(options: Sequence[Option]) -> list[tuple[Option, str]]:
    """Return (option, label) for each row of the table; the label of a scheme counts the named settings that share its numbers."""
    hidden = presets(options)
    counts = Counter(hidden.values())
    return [
        (item, f"{item.label} (+{counts[item.label]})" if counts[item.label] else item.label)
        for item in options if item.label not in hidden
    ]


def _main_table(demand: Demand, options: Sequence[Option]) -> Table:
    table = Table(
        title=f"{demand.batch} x {demand.context:,} tokens", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        header_style="bold", pad_edge=False,
        caption="a token: device and host; request, total: on the device; host: pinned memory; needed: everything counted; "
        "(+8): so many settings of the scheme have the same numbers",
        caption_justify="left",
    )
    table.add_column("scheme")
    for name in ("a token, B", "request, GB", "total, GB", "host, GB", "of dense", "needed, GB", "largest batch", "longest context"):
        table.add_column(name, justify="right")
    for item, label in _rows(options):
        stores, batch, tokens = item.stores, demand.batch, demand.context
        total, host = stores.device_bytes(batch, tokens), stores.host_bytes(batch, tokens)
        longest = f"{item.longest_context:,}" if item.longest_context < MOST_TOKENS else f"over {MOST_TOKENS:,}"
        table.add_row(
            escape(label), f"{stores.bytes_per_token(tokens):,.0f}", f"{stores.device_bytes(1, tokens) / GB:.3f}",
            f"{total / GB:.3f}", f"{host / GB:.3f}" if host else "", f"{(total + host) / stores.dense_bytes(batch, tokens):.1%}",
            f"{demand.needed(stores, batch, tokens) / GB:.1f}", f"{item.largest_batch:,}", longest,
            style="" if item.fits else "dim",
        )
    return table


def _share_table(demand: Demand, options: Sequence[Option]) -> Table:
    table = Table(
        title="bytes by purpose, MB", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
        caption="scales: with zero points and norms; left: tensors that stay as the model made them; growing: a plane while a store grows",
        caption_justify="left",
    )
    table.add_column("scheme")
    for share in StoragePurpose:
        table.add_column(share.value, justify="right")
    table.add_column("growing", justify="right")
    for item, label in _rows(options):
        found = item.stores.shares(demand.batch, demand.context)
        counts = [found.get((share, False), 0) + found.get((share, True), 0) for share in StoragePurpose]
        growing = item.stores.growing_bytes(demand.batch, demand.context)
        table.add_row(escape(label), *(f"{count / 1e6:,.1f}" if count else "" for count in [*counts, growing]))
    return table


def _lighter(model: Model, demand: Demand, options: Sequence[Option], found: Recommendation) -> str:
    return lighter(options, found, demand, model.weights.nbytes(WeightFormat.INT4))


def _reasons(model: Model, demand: Demand, options: Sequence[Option], found: Recommendation) -> RenderableType:
    """Return the reasons for the recommendation, one a line; settings that share a scheme's numbers are named once."""
    hidden, lines = presets(options), Text("why:", style="bold")
    for reason in (*found.reasons, _lighter(model, demand, options, found)):
        head, colon, listed = reason.partition(": ")
        names = listed.split(", ")
        if len(set(names) & hidden.keys()) > 1:
            kept = [name for name in names if name not in hidden]
            counts = Counter(hidden[name] for name in names if name in hidden)
            reason = head + colon + ", ".join([*kept, *(f"{count} settings of {base}" for base, count in counts.items())])  # noqa: PLW2901
        if reason:
            lines.append(f"\n  {reason}", style="not bold default")
    return Padding(lines, (0, 0, 1, 0))


def formulas(options: Sequence[Option]) -> RenderableType:
    """Return the bytes of each scheme as formulas of ``Layout.nbytes``, which also sizes allocations."""
    lines = Text("bytes, device and host, of B requests of T tokens", style="bold")
    for item in options:
        lines.append(f"\n  {item.label}: ", style="bold").append(str(item.stores.formula), style="not bold")
    ends = sorted({end for item in options for end in item.stores.ends if end is not None})
    lines.append(f"\n  {page_symbol(None)}: pages of 64 tokens that hold T tokens; ceil(T / 64) in a static cache", style="not bold")
    for end in ends:
        lines.append(f"\n  {page_symbol(end)}: pages of a cache that holds {end:,} tokens at most", style="not bold")
    return lines
