"""``kvcompile calibrate``: measures static scales of a model on text files, and how many values these scales clip."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.extensions.beyond.learning.text import batches
from kvcompile.extensions.static_scales.measure.calibrate import Calibration, calibrate
from kvcompile.extensions.static_scales.storage import save_scales
from kvcompile.progress import ProgressLine
from kvcompile.tools.cli.learn import held_apart, tokens_of
from kvcompile.tools.cli.targets import TargetOptions, resolve
from kvcompile.types import Role


def run(arguments: argparse.Namespace) -> int:
    """Measure static scales, write them to a file, and print how many values they clip; return the exit status, 0.

    Raises TargetError for a target that names no model, BadBatch for too short a text, and the errors of ``calibrate``.
    """
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    found: list[Calibration] = []
    with ProgressLine("calibrate") as progress:
        progress.at("loading the model")
        model = resolve(arguments.target, TargetOptions(dtype=dtype, device=arguments.device)).model
        tokens = tokens_of(arguments, model)
        progress.at("reading text")
        known, held_out = held_apart(arguments, tokens)
        progress.at("measuring")
        scheme = calibrate(
            model, batches(known[: arguments.sequences], tokens, arguments.batch), arguments.scheme, granularity=arguments.granularity,
            percentile=arguments.percentile, margin=arguments.margin, validation=batches(held_out, tokens, arguments.batch),
            report=found.append,
        )
    save_scales(scheme, arguments.out, {"data": ", ".join(path.name for path in arguments.data)})
    console = Console(stderr=True)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(found[0]), indent=2) + "\n")
    else:
        console.print(table(found[0]))
    console.print(f"{arguments.out}: {scheme.name}, {len(found[0].slots) // 2} layers, {found[0].tokens:,} tokens", highlight=False)
    return 0


def as_json(found: Calibration) -> dict[str, Any]:
    """Return the numbers of ``table`` as plain data, ranges and magnitudes in the units of the cache."""
    return {"scheme": found.scheme.name, "tokens": found.tokens, "slots": [
        {
            "path": slot.path, "part": f"{slot.role.value}s", "largest": slot.amax,
            "range": float(slot.scales.values.max()) * found.scheme.qmax, "clipped": slot.clipped,
            "clipped_held_out": slot.clipped_validation,
        } for slot in found.slots
    ]}


def table(found: Calibration) -> Table:
    """Return a table of every layer's keys and values: largest magnitude, range covered, and share of values clipped."""
    made = Table(
        title="largest magnitude, largest range of a scale, share of values clipped (held out)", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
    )
    made.add_column("layer")
    for role in Role:
        for name in ("amax", "range", "clipped"):
            made.add_column(f"{role.value}s\n{name}", justify="right")
    for path in dict.fromkeys(slot.path for slot in found.slots):
        cells = []
        for role in Role:
            slot = next(slot for slot in found.slots if (slot.path, slot.role) == (path, role))
            beyond = "" if slot.clipped_validation is None else f" ({slot.clipped_validation:.3%})"
            reach = float(slot.scales.values.max()) * found.scheme.qmax
            cells += [f"{slot.amax:.4g}", f"{reach:.4g}", f"{slot.clipped:.3%}{beyond}"]
        made.add_row(path, *cells)
    return made
