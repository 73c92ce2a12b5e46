"""Tables of results: comparison of schemes, accuracy by depth and length, attention by layer, questions with different outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcompile.report import size_text
from kvcompile.schemes.certificate.telemetry import COLUMNS
from kvcompile.tools.evaluation.measures import Measured, mean
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.statistics import Mean, Proportion

BANDS = ((0.95, "on green"), (0.8, "on dark_green"), (0.5, "on dark_goldenrod"), (0.2, "on dark_orange3"), (0.0, "on red"))
"""Colour of a cell by the smallest share of right answers that it covers."""
TESTED = (
    "p: McNemar's exact test, two-sided, not corrected for the\nnumber of comparisons; difference of accuracy with its 95% bootstrap "
    "interval over questions"
)


def _table(title: str, caption: str) -> Table:
    return Table(
        title=escape(title), title_justify="left", title_style="bold", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD,
        header_style="bold", pad_edge=False,
    )


def summary_table(results: Results) -> Table:
    """Return a table of all schemes over all lengths; bytes at the longest."""
    config, reference = results.config, results.reference
    lengths = ", ".join(f"{length:,}" for length in results.lengths)
    table = _table(
        f"{config['model']} in {config['dtype']}: prompts of {lengths} {config['unit']}, then decoding from the cache ({config['inner']})",
        f"{config['batch']} texts and {config['questions']} questions a task, each length; shares with their 95% intervals\n"
        f"the model as it is, uncompiled: {reference.bits_per_byte:.3f} bits per byte"
        + "".join(f", {task} {reference.share(task).hits}/{reference.share(task).trials}" for task in reference.tasks),
    )
    table.add_column("scheme")
    for name in ("bits per byte", "same next", "KL (nats)", *reference.tasks, "lost, won", "p", "cache", "of dense"):
        table.add_column(name, justify="right")
    for row in results.schemes:
        found = results.compared(row)
        paired = found.paired["all"]
        table.add_row(
            escape(row.scheme), f"{row.bits_per_byte:.3f}", str(row.agreement),
            f"{row.kl:.2g}\n[dim]{found.kl.low:.1g} to {found.kl.high:.1g}[/]",
            *(str(row.share(task)) for task in reference.tasks), f"{paired.lost}, {paired.won}", f"{paired.p:.2g}",
            size_text(row.cache_bytes), f"{row.cache_bytes / row.dense_bytes:.1%}" if row.dense_bytes else "",
        )
    return table


def kind_table(results: Results) -> Table:
    """Return a table of KL by scheme, length of prompt and kind of text, with the worst text of each."""
    table = _table(
        "KL in nats a token by kind of text", "mean over the texts of a kind and length, and the largest of one text in brackets",
    )
    table.add_column("scheme")
    table.add_column(results.config["unit"], justify="right")
    for kind in results.reference.kinds:
        table.add_column(kind, justify="right")
    for row in results.schemes:
        for number, length in enumerate(results.lengths):
            found = [row.figures("kl", kind, length) for kind in results.reference.kinds]
            cells = (f"{mean(values):.2g} [dim]({max(values):.2g})[/]" if values else "" for values in found)
            table.add_row("" if number else escape(row.scheme), f"{length:,}", *cells)
    return table


def cell(share: Proportion) -> Text:
    """Return one cell of a heatmap: right answers of questions, coloured; empty without questions."""
    if not share.trials:
        return Text("")
    style = next(style for least, style in BANDS if share.value >= least)
    return Text(f" {share.hits}/{share.trials} ", style=f"white {style}")


def grid(row: Measured, task: str) -> tuple[list[float], list[int], list[list[Proportion]]]:
    """Return (depths, lengths, right answers [depth][length]) of the questions of one task that a scheme was asked."""
    picked = row.picked(task)
    depths, lengths = sorted({item.depth for item in picked}), sorted({item.length for item in picked})
    return depths, lengths, [[row.share(task, length, depth) for length in lengths] for depth in depths]


def heatmap(rows: Sequence[Measured], task: str, unit: str) -> Table:
    """Return a table of one task's right answers: schemes and depths down, lengths of prompts in ``unit`` across."""
    table = _table(f"{task}: right answers by depth, and by {unit} of prompt", "depth: share of the text before the first statement")
    table.add_column("scheme")
    table.add_column("depth", justify="right")
    for length in grid(rows[0], task)[1]:
        table.add_column(f"{length:,}", justify="center")
    for row in rows:
        depths, _, cells = grid(row, task)
        for number, (depth, shares) in enumerate(zip(depths, cells, strict=True)):
            last = number == len(depths) - 1
            table.add_row("" if number else escape(row.scheme), f"{depth:.0%}", *(cell(share) for share in shares), end_section=last)
    return table


def layer_table(rows: Sequence[Measured]) -> Table:
    """Return a table of the errors of every layer's attention under every scheme, means over lengths."""
    table = _table(
        "outputs of attention compared with the uncompressed model's, decoded tokens",
        "signal to noise in decibels, cosine, mean square error; a layer's error holds that of the layers before it",
    )
    table.add_column("module")
    shown = [row for row in rows if row.layers]
    for row in shown:
        table.add_column(escape(row.scheme), justify="right")
    for path in dict.fromkeys(layer.path for row in shown for layer in row.layers):
        cells = []
        for row in shown:
            found = [layer for layer in row.layers if layer.path == path]
            if not found:
                cells.append("")
                continue
            snr, cosine, mse = (mean([getattr(layer, name) for layer in found]) for name in ("snr", "cosine", "mse"))
            cells.append(f"{snr:.1f} dB  {cosine:.4f}  {mse:.1e}")
        table.add_row(escape(path), *cells)
    return table


def paired_table(results: Results) -> Table:
    """Return a table of outcomes of the same questions under the uncompressed model and each scheme, by task."""
    table = _table(
        "paired questions: the uncompressed model compared with each scheme",
        f"lost: the uncompressed model alone was right; won: the scheme alone; {TESTED}",
    )
    table.add_column("scheme")
    for name in ("task", "both", "lost", "won", "neither", "p", "difference"):
        table.add_column(name, justify="right")
    for row in results.schemes:
        for task, paired in results.compared(row).paired.items():
            more = paired.difference
            table.add_row(
                escape(row.scheme) if task == "all" else "", task, *map(str, (paired.both, paired.lost, paired.won, paired.neither)),
                f"{paired.p:.2g}", f"{more.value:+.1%} [dim]{more.low:+.1%} to {more.high:+.1%}[/]",
            )
    return table


def beside_table(results: Results, base: Measured) -> Table:
    """Return a table of every other scheme against ``base``: differences of KL and bits per byte over texts, and outcomes of questions."""
    name = escape(base.scheme)
    table = _table(
        f"paired texts and questions: {base.scheme} compared with each other scheme",
        f"less: the scheme's less that of {name}, nats a token and bits per byte, 95% bootstrap intervals over texts\n"
        f"lost: {name} alone was right; won: the scheme alone; {TESTED}",
    )
    table.add_column("scheme")
    for column in ("of its bytes", "KL less", "bits less", "both", "lost", "won", "neither", "p", "difference"):
        table.add_column(column, justify="right")
    for row in results.schemes:
        if row is not base:
            found = results.beside(row, base)
            pairs = found.paired["all"]
            table.add_row(
                escape(row.scheme), f"{row.cache_bytes / base.cache_bytes:.1%}" if base.cache_bytes else "", _more(found.kl, "+.2g"),
                _more(found.bits, "+.3f"), *map(str, (pairs.both, pairs.lost, pairs.won, pairs.neither)), f"{pairs.p:.2g}",
                _more(pairs.difference, "+.1%"),
            )
    return table


def _more(mean: Mean, form: str) -> str:
    return f"{mean.value:{form}}\n[dim]{mean.low:{form}} to {mean.high:{form}}[/]"


def telemetry_table(rows: Sequence[Measured]) -> Table:
    """Return a table of certified attention: bounds before and after the fallback, and shares of rungs and causes.

    Its rows follow the paper's tables 11, 12 and 15.
    """
    table = _table(
        "certified attention while the texts were decoded",
        "bounds: mean, median, 95% quantile and largest over head-steps; rungs and causes: share of head-steps; blocks: share of visible\n"
        "blocks of codes; promoted keys: mean, median and 95% quantile of blocks a head-step",
    )
    shown = [row for row in rows if row.telemetry.get("head_steps")]
    table.add_column("")
    for row in shown:
        table.add_column(escape(row.scheme), justify="right", overflow="fold")
    telemetry = [row.telemetry for row in shown]

    def quantiles(each: dict[str, float], name: str) -> str:
        found = (each.get(f"p{share}_{name}") for share in (50, 95))
        return "".join(f"{value:.2g}, " for value in found if value is not None)

    table.add_row("head-steps", *(f"{each['head_steps']:,.0f}" for each in telemetry))
    promoted = (f"{each['keys'] / each['head_steps']:.1f}, {quantiles(each, 'keys')}".removesuffix(", ") for each in telemetry)
    table.add_row("promoted keys", *promoted)
    for name in COLUMNS:
        label = name.replace("_", " ")
        if name.startswith("sum_"):
            figure = name.removeprefix("sum_")
            bounds = (f"{each[name] / each['head_steps']:.2g}, {quantiles(each, figure)}{each['most_' + figure]:.2g}" for each in telemetry)
            table.add_row(figure.replace("_", " "), *bounds)
        elif name.startswith(("rung_", "cause_")) or name == "widened":
            table.add_row(label, *(f"{each[name] / each['head_steps']:.2%}" for each in telemetry))
        elif name in {"keys", "values", "explored"}:
            table.add_row(f"{label} in full precision", *(f"{each[name] / max(1.0, each['blocks']):.1%}" for each in telemetry))
        elif name.endswith("_found") and any(each[name] for each in telemetry):
            key_or_value = name.removesuffix("_found")
            shares = (f"{each[name] / max(1.0, each[name] + each[key_or_value + '_fetched']):.1%}" for each in telemetry)
            table.add_row(f"{key_or_value}s found in the scratch", *shares)
        elif name.endswith("_bytes") and any(each[name] for each in telemetry):
            table.add_row(f"{label} over the bus", *(f"{each[name]:,.0f}" for each in telemetry))
    return table
