"""``kvcompile plan --engine``: tokens that an engine's blocks hold under each scheme, its start line, and the command that starts it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcompile.schemes.pairs import parse_pair
from kvcompile.serving.block_layout import capacity, token_line
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.plan_answer import memory_line
from kvcompile.tools.planner.capacity import Demand
from kvcompile.tools.planner.engines import Engine, EngineLayer, EngineOption, layers_of, option_of
from kvcompile.tools.planner.model import Model
from kvcompile.tools.planner.recommend import Generation, Option, recommend
from kvcompile.tools.planner.stores import DENSE


def show(arguments: argparse.Namespace, model: Model, demand: Demand, measured: Sequence[Option]) -> None:
    """Print the plan of an engine for schemes and their damages, ``measured``, as JSON if asked for.

    Raises NotPlanned for models whose caches an engine's blocks do not hold.
    """
    engine, layers = Engine(arguments.engine), layers_of(model.stores(DENSE, demand.context), model.name)
    memory = demand.memory - demand.beside(demand.context)
    found = {item.label: option_of(item.label, parse_pair(item.label), layers, engine, memory) for item in measured}
    options = [item for item in found.values() if isinstance(item, EngineOption)]
    refused = {label: str(item) for label, item in found.items() if not isinstance(item, EngineOption)}
    rooms = {item.label: item.requests(demand.context) for item in options}
    held = [
        dataclasses.replace(item, fits=rooms[item.label] >= demand.batch, largest_batch=rooms[item.label])
        for item in measured if item.label in rooms
    ]
    recommended = recommend(held, demand, Generation(arguments.gpu), arguments.damage).scheme
    chosen = next((item for item in options if item.label == recommended), None)
    target = str(arguments.target)
    served = "MODEL" if target.endswith((".json", ".py")) or ".py:" in target or target.startswith("hf:") else shlex.quote(target)
    command = engine.command(chosen.label, served) if chosen is not None else ""
    shown = console()
    if arguments.json:
        shown.file.write(json.dumps(as_json(engine, memory, demand, options, refused, chosen, command), indent=2) + "\n")
        return
    damages = {item.label: item.damage.kl for item in measured if item.damage is not None}
    shown.print(_tables(model, layers, demand, options, refused, damages, engine))
    if chosen is None:
        nothing = f"recommended: nothing, no measured scheme that blocks hold has room for {demand.batch} requests"
        shown.print(Text(nothing, style="bold yellow"))
        return
    shown.print(Text(f"recommended: {chosen.label}", style="bold green"))
    shown.print(start_line(chosen, layers, engine), soft_wrap=True, highlight=False)
    shown.print(Text(command, style="bold"), soft_wrap=True)


def start_line(option: EngineOption, layers: Sequence[EngineLayer], engine: Engine) -> str:
    """Return what the engine's start logs: schemes, bytes a token, tokens that fit, and how many would in the model's dtype."""
    line = token_line(option.keys, option.values, option.token, len(layers) if engine is Engine.VLLM else None)
    return f"{line}, {capacity(option.tokens, option.tokens * option.token, option.dense, layers[0].dtype)}"


def as_json(
    engine: Engine, memory: int, demand: Demand, options: Sequence[EngineOption], refused: Mapping[str, str], chosen: EngineOption | None,
    command: str,
) -> dict[str, Any]:
    """Return all numbers of the plan as plain data, sizes in bytes."""
    return {
        "engine": engine.value, "memory_for_blocks": memory, "context": demand.context,
        "schemes": [
            {
                "scheme": item.label, "bytes_per_token": item.token, "tokens": item.tokens, "dense_tokens": item.dense_tokens,
                "requests": item.requests(demand.context),
            }
            for item in options
        ],
        "refused": dict(refused), "recommended": chosen.label if chosen is not None else None, "command": command,
    }


def _tables(
    model: Model, layers: Sequence[EngineLayer], demand: Demand, options: Sequence[EngineOption], refused: Mapping[str, str],
    damages: Mapping[str, float], engine: Engine,
) -> RenderableType:
    head = Text(f"{model.name} in {engine.value}: {len(layers)} layers", style="bold")
    head.append(f"\n{memory_line(demand, 'blocks')}", style="not bold")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("scheme")
    for name in ("a token, B", "of dense", "tokens", f"requests of {demand.context:,}", "KL, nats"):
        table.add_column(name, justify="right")
    for item in options:
        kl = f"{damages[item.label]:.2g}" if item.label in damages else ""
        share, requests = f"{item.token / item.dense:.1%}", f"{item.requests(demand.context):,}"
        table.add_row(escape(item.label), f"{item.token:,}", share, f"{item.tokens:,}", requests, kl)
    parts: list[RenderableType] = [head, table]
    if windows := sorted({layer.window for layer in layers if layer.window is not None}):
        parts.append(Text(f"layers with a window of {windows[0]:,} tokens are counted like the others", style="yellow"))
    if refused:
        names = dict.fromkeys(label.partition("(")[0].partition("-")[0] for label in refused)
        parts.append(Text(f"not in blocks: {', '.join(names)} (docs/SERVING.md, \"What is refused\"; --json says why)", style="dim"))
    return Group(*parts)
