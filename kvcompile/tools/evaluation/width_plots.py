"""Pictures of adaptive schemes: bits over positions and layers, importance over decode steps, histogram of bits. By matplotlib.

Four pictures for each scheme and length of prompt, drawn from results alone, so that a run's folder can be drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompile.tools.evaluation.adaptation import Adaptation
from kvcompile.tools.evaluation.results import Results

NAME = "widths.png"
"""File name of the picture in a folder."""

KEYS_AND_VALUES = ("keys", "values")
COLOURS = ("tab:blue", "tab:orange")


def rows_of(results: Results) -> list[tuple[str, Adaptation]]:
    """Return (scheme's text, widths of its tokens) for each adaptive scheme and each length of prompt; empty without adaptive schemes."""
    return [(row.scheme, item) for row in results.schemes for item in row.adaptation]


def constant(results: Results) -> list[str]:
    """Return the schemes without pictures: all their tokens have the same bits."""
    return [row.scheme for row in results.schemes if not row.adaptation]


def draw_widths(results: Results, to: Path) -> None:
    """Draw the four pictures of each scheme and length of prompt into one file, whose suffix selects the format."""
    from matplotlib.figure import Figure

    rows = rows_of(results)
    heights = [5.6 + 0.06 * len(item.layers) for _, item in rows]
    figure = Figure(figsize=(12, sum(heights) + 0.3), layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
    unit = results.config["unit"]
    for (scheme, item), (part,) in zip(rows, parts, strict=True):
        part.suptitle(f"{scheme}, a prompt of {item.length:,} {unit} and {item.steps[-1]} decode steps", fontsize=10, fontweight="bold")
        above, below = part.subplots(2, 2)
        _precision(part, above, item)
        _importance(part, below[0], item)
        _histogram(below[1], item)
    if missing := constant(results):
        figure.supxlabel(f"not drawn, as all tokens have the same bits: {', '.join(missing)}", fontsize=8, color="dimgray")
    figure.savefig(to, dpi=120)


def _precision(part: Any, axes: Sequence[Any], item: Adaptation) -> None:
    """Draw two pictures into ``axes``, the bits of keys and of values: positions across, layers down, in one colour scale.

    ``part``: the figure's part that gets the colour bar. The bits are those of the first text, after the last step.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap

    widths = sorted({int(bits) for key_or_value in item.histogram.values() for bits in key_or_value})
    shades = ListedColormap(colormaps["viridis"]([at / max(1, len(widths) - 1) for at in range(len(widths))]))
    norm = BoundaryNorm([at - 0.5 for at in range(len(widths) + 1)], shades.N)
    image, short = None, [_short(path, at) for at, path in enumerate(item.layers)]
    for key_or_value, place in zip(KEYS_AND_VALUES, axes, strict=True):
        levels = [[widths.index(bits) for bits in row] for row in item.bits(key_or_value)]
        image = place.imshow(levels, aspect="auto", cmap=shades, norm=norm, interpolation="nearest")
        few = range(0, len(short), -(-len(short) // 12))
        place.set(title=f"bits of {key_or_value}, first text, after the last step", xlabel="position", yticks=list(few))
        place.set_yticklabels([short[at] for at in few])
        _small(place)
    axes[0].set_ylabel("layer", fontsize=8)
    bar = part.colorbar(image, ax=list(axes), ticks=range(len(widths)), shrink=0.9, pad=0.01, aspect=30)
    bar.ax.set_yticklabels([str(bits) for bits in widths], fontsize=7)
    bar.set_label("bits a channel", fontsize=8)


def _short(path: str, number: int) -> str:
    """Return the layer number in a module path, or ``number`` if it has none."""
    return next((name for name in path.split(".") if name.isdigit()), str(number))


def _importance(part: Any, axes: Any, item: Adaptation) -> None:
    """Draw the importance of the first text's tokens into ``axes``: positions across, decode steps down, mean of layers.

    A tick at the left edge marks each step at which widths were decided. Values below the 5% quantile, or below 1e-4 of the largest, are
    drawn as that.
    """
    from matplotlib.colors import LogNorm

    spans = max(map(len, item.importance))
    padded = [[*row, *[float("nan")] * (spans - len(row))] for row in item.importance]
    above = sorted(value for row in item.importance for value in row if value > 0)
    top = above[-1] if above else 1.0
    # Clip small values: tokens with almost no attention would use up the colour scale.
    least = max(above[len(above) // 20], top * 1e-4) if above else 0.1
    edges = [number * item.span for number in range(spans + 1)]
    borders = [0.0, *((a + b) / 2 for a, b in zip(item.steps, item.steps[1:], strict=False)), item.steps[-1] + 0.5]
    shown = [[max(value, least) if value == value else value for value in row] for row in padded]
    image = axes.pcolormesh(edges, borders, shown, norm=LogNorm(least, max(top, 1.01 * least)), cmap="magma", rasterized=True)
    axes.invert_yaxis()
    for step in item.decided:
        axes.axhline(step, xmax=0.02, color="cyan", linewidth=1.2)
    bar = part.colorbar(image, ax=axes, shrink=0.9, pad=0.01, aspect=30)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("times the mean token's", fontsize=8)
    note = " (cyan: widths were decided)" if item.decided else ""
    axes.set(title="importance, first text, mean of layers", xlabel="position")
    axes.set_ylabel(f"decode step{note}", fontsize=8)
    _small(axes)


def _histogram(axes: Any, item: Adaptation) -> None:
    """Draw into ``axes`` the share of tokens at each width, in percent, over all texts and layers, for keys and for values."""
    widths = sorted({int(bits) for key_or_value in item.histogram.values() for bits in key_or_value})
    for at, (key_or_value, colour) in enumerate(zip(KEYS_AND_VALUES, COLOURS, strict=True)):
        counts = [item.histogram[key_or_value].get(str(bits), 0) for bits in widths]
        total = max(1, sum(counts))
        mean = sum(bits * count for bits, count in zip(widths, counts, strict=True)) / total
        shares = [100 * count / total for count in counts]
        places = [number + 0.4 * at - 0.2 for number in range(len(widths))]
        bars = axes.bar(places, shares, 0.4, color=colour, label=f"{key_or_value}, {mean:.2f} bits on average")
        axes.bar_label(bars, [f"{share:.0f}" if share >= 0.5 else "<1" if share else "" for share in shares], fontsize=6)
    axes.set(title="tokens by bits, all texts and layers", xlabel="bits a channel", xticks=range(len(widths)), xticklabels=widths)
    axes.set_ylabel("% of tokens", fontsize=8)
    axes.margins(y=0.2)
    axes.legend(fontsize=7, loc="upper right")
    _small(axes)


def _small(axes: Any) -> None:
    """Set small fonts: a figure has many pictures."""
    axes.title.set_fontsize(8)
    axes.xaxis.label.set_fontsize(8)
    axes.tick_params(labelsize=7)
