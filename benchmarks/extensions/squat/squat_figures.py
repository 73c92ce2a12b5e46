"""Figures 2 and 5 of "SQuat" in kind, on tinylm: how far queries are from subspaces, and how codes of keys change attention scores.

    python benchmarks/extensions/squat/squat_study.py --parts figures --json FILE [--plot PICTURE] [--model tinylm] [--lengths 1600]
            [--tail 400] [--rows 8]
                                     [--other TEXT] [--print]

Left of Figure 2, and Figure 5 at other layers: the deviation |q - Proj(q)| of queries of length 1 from the span of the leading right
singular vectors of a set of queries, over the number of vectors. The queries are those of decoded tokens, which the span has to serve;
the sets are ``all`` tokens of the sequence, its ``prompt`` alone, ``another`` sequence of the same kind, and one of a text of an``other``
kind. A set has the queries of all query heads of a kv head, as the scheme's.

Middle and right: the changes of scores q k / sqrt(D), and of their softmax, of decoded queries over the prompt's keys, where codes stand
for keys. ``before`` RoPE is the source's setting, in which nothing is turned; ``after`` is what ``squat`` stores; ``used`` is what
``squat-pre`` does: codes of keys before RoPE, turned as they are read. The source lets the model answer; here the text goes on as it does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcompile.schemes import parse
from kvcompile.tools.cli.subjects import SHIPPED, tinylm
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.statistics import bootstrap
from kvcompile.types import Role, SlotSpec

FRAMES = ("before", "after")
CHANGED = (*FRAMES, "used")
SETS = ("all", "prompt", "another", "other")
SCHEMES = ("kivi", "squat", "squat-paper")
TOLD = {"before": "before RoPE", "after": "after RoPE", "used": "stored before RoPE, read after it"}
MEASURES = ("scores", "weights", "keys")
"""Mean |q (k' - k)| / sqrt(D); mean over queries of the sum of |w' - w|; the norm of k' - k over that of k."""
SHOWN = (5, 10, 20, 30, 40)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Queries [K, G, S, D] and keys [K, S, D] of one layer and one text; the cosines and sines [1, S, D] of RoPE."""

    q: torch.Tensor
    k: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]

    def turned(self, k_KSD: torch.Tensor) -> torch.Tensor:
        """Keys of the first tokens after RoPE."""
        cos, sin = (part[:, : k_KSD.shape[-2]] for part in self.angles)
        return apply_rotary_pos_emb(k_KSD[None], k_KSD[None], cos, sin)[1][0]


def attentions(model: Any) -> dict[str, Any]:
    """Modules with a projection of queries and one of keys, by path."""
    return {path: part for path, part in model.named_modules() if hasattr(part, "q_proj") and hasattr(part, "k_proj")}


@contextlib.contextmanager
def heard(parts: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Outputs of the projections of the last call, by path and name."""
    found: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        return lambda module, inputs, output: found.__setitem__(name, output.detach())

    both = [(f"{path}.{name}", getattr(part, name)) for path, part in parts.items() for name in ("q_proj", "k_proj")]
    handles = [module.register_forward_hook(hook(name)) for name, module in both]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def heads_of(model: Any, ids: torch.Tensor) -> dict[str, list[Heads]]:
    """Queries and keys of one text [S] in every layer, before and after RoPE."""
    parts = attentions(model)
    with heard(parts) as found:
        model(input_ids=ids[None], use_cache=False)
    groups, width = model.config.num_key_value_heads, model.config.head_dim
    made: dict[str, list[Heads]] = {frame: [] for frame in FRAMES}
    for path in parts:
        q, k = (found[f"{path}.{name}"][0].unflatten(-1, (-1, width)).transpose(0, 1).float() for name in ("q_proj", "k_proj"))
        cos, sin = model.model.rotary_emb(q, torch.arange(len(ids), device=ids.device)[None])
        turned = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        for frame, (queries, keys) in zip(FRAMES, ((q, k), (turned[0][0], turned[1][0])), strict=True):
            made[frame].append(Heads(queries.unflatten(0, (groups, -1)), keys, (cos, sin)))
    return made


def deviations(q_KnD: torch.Tensor, spans_KmD: torch.Tensor) -> torch.Tensor:
    """Mean |q - Proj(q)| of queries of length 1 from the span of the leading 1 to D singular vectors of other queries, [D]."""
    vectors = torch.linalg.svd(spans_KmD.double(), full_matrices=False).Vh
    inside = (torch.nn.functional.normalize(q_KnD.double(), dim=-1) @ vectors.mT).square().cumsum(-1)
    return (1 - inside).clamp(min=0).sqrt().mean((0, 1))


def changes(scheme: str, taught: Heads, read: Heads, prompt: int) -> tuple[float, ...]:
    """``MEASURES`` of a scheme: codes of the prompt's whole groups of keys, taught by the prompt's queries, read by later queries.

    ``taught``: before RoPE where keys are stored so, else after it; ``read``: the frame in which scores are made.
    """
    made = parse(scheme).for_role(Role.KEY)
    slot = SlotSpec(len(taught.k), taught.k.shape[-1], torch.float32, Role.KEY)
    whole = prompt // made.window * made.window
    keys = taught.k[None, :, :whole]
    fixed = made.calibrate(taught.q[None, :, :, :prompt], None) if made.calibrates(slot) else ()
    lost = (made.decode(made.encode(keys, *fixed), slot).float() - keys)[0]
    share = float(lost.norm() / keys.norm())
    # RoPE is linear, so an error is turned as its key is.
    lost = lost if taught is read else taught.turned(lost)
    later = read.q[:, :, prompt:].flatten(1, 2) * slot.head_dim**-0.5
    scores, moved = later @ read.k[:, :whole].mT, later @ lost.mT
    weights = ((scores + moved).softmax(-1) - scores.softmax(-1)).abs().sum(-1).mean()
    return float(moved.abs().mean()), float(weights), share


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All records: deviations by frame, layer, set, text and rank; changes by frame, layer, scheme, text and measure."""
    subject = tinylm("cpu", None, SHIPPED[options.model])
    (prompt,) = map(int, options.lengths.split(","))
    rows, console = subject.texts(prompt, options.tail, options.rows), Console(stderr=True)
    start, whole = len(subject.start), rows.shape[1]
    read = options.other.read_bytes()[: whole - start]
    assert len(read) == whole - start, f"{options.other} has fewer than {whole - start} bytes"
    other = heads_of(subject.model, torch.tensor([*subject.start, *read]))
    texts = [heads_of(subject.model, row) for row in rows]
    layers = len(texts[0][FRAMES[0]])
    apart = {frame: [{name: list[list[float]]() for name in SETS} for _ in range(layers)] for frame in FRAMES}
    lost = {frame: [{name: list[tuple[float, ...]]() for name in SCHEMES} for _ in range(layers)] for frame in CHANGED}
    for number, text in enumerate(texts):
        console.print(f"text {number + 1} of {len(texts)}")
        following = texts[(number + 1) % len(texts)]
        for layer in range(layers):
            for frame in FRAMES:
                heads, others = text[frame][layer], {"another": following[frame][layer].q, "other": other[frame][layer].q}
                sets = {"all": heads.q, "prompt": heads.q[:, :, : start + prompt]} | others
                later = heads.q[:, :, start + prompt :].flatten(1, 2)
                for name in SETS:
                    apart[frame][layer][name].append(deviations(later, sets[name].flatten(1, 2)).tolist())
            for frame in CHANGED:
                taught = text["after" if frame == "after" else "before"][layer]
                read = text["before" if frame == "before" else "after"][layer]
                for name in SCHEMES:
                    lost[frame][layer][name].append(changes(name, taught, read, start + prompt))
    told = {name: str(value) for name, value in vars(options).items() if name in {"model", "lengths", "tail", "rows", "other"}}
    return {"options": told, "machine": machine("cpu"), "deviations": apart, "changes": lost}


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """Deviations at a few ranks, and changes of scores beside kivi's, by layer."""
    for frame in FRAMES:
        layers = found["deviations"][frame]
        title = f"deviation of decoded queries, {frame} RoPE; mean over texts"
        table = _table(title, "layer", "span of", *(f"r = {rank}" for rank in SHOWN))
        for layer, sets in enumerate(layers):
            for name in SETS:
                curve = torch.tensor(sets[name]).mean(0)
                table.add_row("" if name != SETS[0] else str(layer), name, *(f"{curve[rank - 1]:.3f}" for rank in SHOWN))
        width = len(layers[0][SETS[0]][0])
        table.add_row("", "any directions", *(f"{(1 - rank / width) ** 0.5:.3f}" for rank in SHOWN))
        yield table
    for frame in CHANGED:
        table = _table(
            f"what codes change, {TOLD[frame]}: kivi's, and how many times that; 95% intervals over texts", "layer", "of",
            *(name if name == SCHEMES[0] else f"{name}, times" for name in SCHEMES),
        )
        for layer, schemes in enumerate(found["changes"][frame]):
            for at, measure in enumerate(MEASURES):
                base = [row[at] for row in schemes[SCHEMES[0]]]
                cells = [f"{sum(base) / len(base):.4f}"]
                for name in SCHEMES[1:]:
                    ratio = bootstrap([row[at] / own for row, own in zip(schemes[name], base, strict=True)])
                    cells.append(f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
                table.add_row("" if at else str(layer), measure, *cells)
        yield table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right")
    return table


def draw(found: dict[str, Any], picture: Path) -> None:
    """Deviation over rank before RoPE in three layers (Figure 2, left, and Figure 5); changes by layer (Figure 2, middle and right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    axes = figure.subplots(2, 3)
    layers = found["deviations"]["before"]
    width = len(layers[0][SETS[0]][0])
    ranks = range(1, width + 1)
    for axis, layer in zip(axes[0], (0, len(layers) // 2, len(layers) - 1), strict=True):
        for name in SETS:
            axis.plot(ranks, torch.tensor(layers[layer][name]).mean(0), label=f"span of {name}")
        axis.plot(ranks, [(1 - rank / width) ** 0.5 for rank in ranks], ":", color="gray", label="any directions")
        axis.set(title=f"layer {layer}, before RoPE", xlabel="directions", ylabel="deviation of decoded queries", ylim=(0, 1))
    axes[0][0].legend(fontsize=7)
    top = max(row[0] for frame in CHANGED for schemes in found["changes"][frame] for rows in schemes.values() for row in rows)
    for axis, frame in zip(axes[1], CHANGED, strict=True):
        for shift, name in zip((-0.27, 0.0, 0.27), SCHEMES, strict=True):
            means = [bootstrap([row[0] for row in schemes[name]]) for schemes in found["changes"][frame]]
            off = [[mean.value - mean.low for mean in means], [mean.high - mean.value for mean in means]]
            axis.bar([number + shift for number in range(len(means))], [mean.value for mean in means], 0.25, yerr=off, label=name)
        axis.set(title=TOLD[frame], xlabel="layer", ylabel="mean |change of a score|", ylim=(0, 1.02 * top))
    axes[1][0].legend(fontsize=7)
    figure.savefig(picture, dpi=75)


def run(options: argparse.Namespace) -> int:
    """Measure unless FILE has it, print, and draw where it is asked for."""
    if not options.print:
        options.json.write_text(json.dumps(measured(options)) + "\n")
    found = json.loads(options.json.read_text())
    console = Console(width=140)
    for table in tables(found):
        console.print(table)
    if options.plot is not None:
        draw(found, options.plot)
    return 0
