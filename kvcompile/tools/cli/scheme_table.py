"""``kvcompile schemes``: a table of the registered schemes with their options and their bytes for a given shape."""

from __future__ import annotations

import argparse
import enum
import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcompile.errors import SchemeError
from kvcompile.report import size_text
from kvcompile.schemes import Adaptive, Scheme, registered
from kvcompile.tools.cli.console import console
from kvcompile.types import Role, SlotSpec, pages_for


def run(arguments: argparse.Namespace) -> int:
    """Print the table of schemes; return the exit status, 0."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.json:
        rows = [scheme_row(kind(), arguments.heads, arguments.head_dim, arguments.layers, dtype, arguments.tokens) for kind in registered()]
        console().file.write(json.dumps(rows, indent=2) + "\n")
        return 0
    console().print(scheme_table(arguments.heads, arguments.head_dim, arguments.layers, dtype, arguments.tokens))
    return 0


def scheme_table(heads: int, head_dim: int, layers: int, dtype: torch.dtype, tokens: int) -> RenderableType:
    """Return a table with one row per scheme at its defaults: bytes of keys and values over all layers, for batch 1."""
    name = str(dtype).removeprefix("torch.")
    table = Table(
        title=f"KV cache of {layers} layers, {heads} kv heads of {head_dim}, {name}, batch 1; scales included", title_justify="left",
        title_style="bold", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
    )
    table.add_column("scheme")
    for column in ("bits", "a token", f"{tokens:,} tokens", "of dense"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("options", overflow="fold")
    notes = Table.grid(padding=(0, 2))
    for kind in registered():
        scheme = kind()
        found = _costs(scheme, heads, head_dim, layers, dtype, tokens)
        cells = ("", "", f"not for {head_dim} channels", "") if found is None else (
            f"{found.bits:.2f}", size_text(found.token), size_text(found.total), f"{found.share:.1%}",
        )
        table.add_row(scheme.name, *cells, _options(scheme))
        notes.add_row(f"[bold]{scheme.name}[/]", f"{escape(_summary(kind))} [dim]({escape(scheme.source)})[/]")
    return Group(table, notes, Text("\nWrite options as int4(group=64)."))


@dataclass(frozen=True)
class Costs:
    """Bits per value, bytes per token, bytes of a whole context in whole pages, and the share of a dense cache.

    For an adaptive scheme the numbers are those of its budget.
    """

    bits: float
    token: float
    total: int
    share: float


def _costs(scheme: Scheme, heads: int, head_dim: int, layers: int, dtype: torch.dtype, tokens: int) -> Costs | None:
    """Return the costs of a scheme for a shape; None if it cannot hold heads of this size."""
    slots = [SlotSpec(heads, head_dim, dtype, role) for role in Role]
    try:
        for slot in slots:
            scheme.check(slot)
    except SchemeError:
        return None
    if isinstance(scheme, Adaptive):
        token = layers * sum(heads * slot.head_dim * scheme.bits_per_value(slot) / 8 for slot in slots)
        total = int(token * tokens)
    else:
        token = layers * sum(scheme.layout(slot).bytes_per_token(heads) for slot in slots)
        total = layers * sum(scheme.layout(slot).nbytes(pages_for(tokens), 1, heads) for slot in slots)
    bits = sum(scheme.bits_per_value(slot) for slot in slots) / len(slots)
    return Costs(bits, token, total, token / (2 * layers * heads * head_dim * dtype.itemsize))


def scheme_row(scheme: Scheme, heads: int, head_dim: int, layers: int, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Return one scheme's row of the table as plain data; the numbers are None if it cannot hold heads of this size."""
    found = _costs(scheme, heads, head_dim, layers, dtype, tokens)
    options = {}
    for option in scheme.options():
        value = getattr(scheme, option.name)
        options[option.name] = {"default": str(getattr(value, "value", value)).removeprefix("torch.")}
        if isinstance(value, enum.Enum):
            options[option.name]["spellings"] = [item.value for item in type(value)]  # type: ignore[assignment]
    return {
        "scheme": scheme.name, "what": _summary(type(scheme)), "source": scheme.source, "tokens": tokens,
        "bits_per_value": None if found is None else found.bits, "bytes_per_token": None if found is None else found.token,
        "bytes": None if found is None else found.total, "of_dense": None if found is None else found.share, "options": options,
    }


def _summary(kind: type[Scheme]) -> str:
    """Return the first line of the class's docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".")


def _options(scheme: Scheme) -> str:
    lines = []
    for option in scheme.options():
        value = getattr(scheme, option.name)
        text = f"{option.name}={str(getattr(value, 'value', value)).removeprefix('torch.')}"
        others = [item.value for item in type(value) if item is not value] if isinstance(value, enum.Enum) else []
        lines.append(text + (f" [dim](or {', '.join(others)})[/]" if others else ""))
    return "\n".join(lines) or "[dim]none[/]"
