"""The answers of ``kvcompile plan`` around its tables: the recommendation, smaller weights if they help, the line to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from kvcompile.schemes import settings
from kvcompile.tools.cli.arguments import GB
from kvcompile.tools.planner.capacity import Demand
from kvcompile.tools.planner.recommend import Option, Recommendation

PASTE = 'model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme="{scheme}"))'


def chosen(options: Sequence[Option], found: Recommendation) -> Option | None:
    """Return the recommended option or, if none is recommended, the one that serves the most requests; None if it serves no request."""
    label = found.scheme or found.most_requests
    best = next((item for item in options if item.label == label), None)
    return best if best is not None and best.largest_batch else None


def memory_line(demand: Demand, purpose: str) -> str:
    """Return what the memory is divided into: weights, activations of a prompt, what is kept free, and the rest, for ``purpose``."""
    beside = demand.beside(demand.context)
    prompt = beside - demand.weights - demand.overhead
    return (
        f"{demand.memory / GB:g} GB = {demand.weights / GB:.2f} weights + {prompt / GB:.2f} activations of a prompt (estimate) + "
        f"{demand.overhead / GB:g} kept free + {(demand.memory - beside) / GB:.2f} for {purpose}"
    )


def answer(options: Sequence[Option], found: Recommendation, demand: Demand) -> RenderableType:
    """Return the recommendation in a line or two, without its reasons."""
    asked = f"{demand.batch} x {demand.context:,} tokens"
    best = chosen(options, found)
    if found.scheme is None:
        fits = f"; {best.label} serves {best.largest_batch}" if best is not None else ""
        return Padding(Text(f"recommended: nothing, {asked} do not fit{fits}", style="bold yellow"), (0, 0, 1, 0))
    text = Text(f"recommended: {found.scheme}", style="bold green").append(f" for {asked}", style="not bold")
    if found.most_requests not in {None, found.scheme}:
        text.append(f"; for the most requests: {found.most_requests}", style="not bold")
    return Padding(text, (0, 0, 1, 0))


def lighter(options: Sequence[Option], found: Recommendation, demand: Demand, smallest: int) -> str:
    """Return a sentence that proposes four-bit weights, if weights take half of the memory or more and the batch would grow; else "".

    ``smallest``: bytes of the weights in four bits.
    """
    best = chosen(options, found) or max(options, key=lambda item: item.largest_batch, default=None)
    if best is None or 2 * demand.weights < demand.memory or smallest >= demand.weights:
        return ""
    batch = dataclasses.replace(demand, weights=smallest).largest_batch(best.stores)
    if batch <= best.largest_batch:
        return ""
    return (
        f"weights fill {demand.weights / GB:.1f} of {demand.memory / GB:g} GB: with --weights int4 ({smallest / GB:.1f} GB) {best.label} "
        f"serves {batch:,} requests, now {best.largest_batch:,}"
    )


def paste(options: Sequence[Option], found: Recommendation, demand: Demand) -> str:
    """Return the line of Python that uses the recommended scheme; empty if not one request fits."""
    best = chosen(options, found)
    if best is None:
        return ""
    line = PASTE.format(scheme=best.label)
    return line if best.largest_batch >= demand.batch else f"{line}  # {best.largest_batch:,} requests at once"


def presets(options: Sequence[Option]) -> Mapping[str, str]:
    """Return {named setting: label of the scheme whose formula of bytes is the same}, such as {squat-pre: squat}."""
    formulas = {item.label: str(item.stores.formula) for item in options}
    return {
        label: base for label, (base, _) in settings().items()
        if label in formulas and base in formulas and formulas[base] == formulas[label]
    }
