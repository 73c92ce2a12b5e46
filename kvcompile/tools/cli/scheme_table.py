"""``kvcompile schemes``: a table of the registered schemes with their options and their bytes for a given shape."""

from __future__ import annotations

import argparse
import enum
import inspect

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
    """Print the table of schemes."""
    dtype = getattr(torch, arguments.dtype)
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
        table.add_row(scheme.name, *_costs(scheme, heads, head_dim, layers, dtype, tokens), _options(scheme))
        notes.add_row(f"[bold]{scheme.name}[/]", f"{escape(_summary(kind))} [dim]({escape(scheme.source)})[/]")
    return Group(table, notes, Text("\nWrite options as int4(group=64)."))


def _costs(scheme: Scheme, heads: int, head_dim: int, layers: int, dtype: torch.dtype, tokens: int) -> tuple[str, str, str, str]:
    """Return bits per value, bytes per token, bytes of ``tokens`` in whole pages, and the share of a dense cache, as text.

    For an adaptive scheme the numbers are those of its budget.
    """
    slots = [SlotSpec(heads, head_dim, dtype, role) for role in Role]
    try:
        for slot in slots:
            scheme.check(slot)
    except SchemeError:
        return "", "", f"not for {head_dim} channels", ""
    if isinstance(scheme, Adaptive):
        token = layers * sum(heads * slot.head_dim * scheme.bits_per_value(slot) / 8 for slot in slots)
        total = int(token * tokens)
    else:
        token = layers * sum(scheme.layout(slot).bytes_per_token(heads) for slot in slots)
        total = layers * sum(scheme.layout(slot).nbytes(pages_for(tokens), 1, heads) for slot in slots)
    bits = sum(scheme.bits_per_value(slot) for slot in slots) / len(slots)
    return f"{bits:.2f}", size_text(token), size_text(total), f"{token / (2 * layers * heads * head_dim * dtype.itemsize):.1%}"


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
