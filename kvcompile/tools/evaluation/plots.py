"""Pictures of results: quality against bytes and length, heatmaps, widths of adaptive schemes. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompile.errors import BadEvaluation
from kvcompile.tools.evaluation.measures import Measured, mean
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.tables import grid
from kvcompile.tools.evaluation.width_plots import NAME, draw_widths, rows_of

SUFFIXES = (".png", ".svg", ".pdf")
"""File formats of ``--plot``."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw all pictures into a folder and return their paths; none without matplotlib or without schemes."""
    if not can_draw() or not results.schemes:
        return []
    pictures: dict[str, Callable[[Results, Path], None]] = {"bytes.png": by_bytes, "length.png": by_length}
    if results.reference.tasks:
        pictures["heatmaps.png"] = heatmaps
    if rows_of(results):
        pictures[NAME] = draw_widths
    for name, make in pictures.items():
        make(results, folder / name)
    return [folder / name for name in pictures]


MARKERS = "os^DvPX"
"""Markers of points: ten schemes share one, as there are ten colours."""


def style(number: int) -> dict[str, str]:
    """Return colour and marker of scheme ``number``, distinct among 70."""
    return {"color": f"C{number % 10}", "marker": MARKERS[number // 10 % len(MARKERS)]}


def check(to: Path) -> None:
    """Raise BadEvaluation if pictures cannot be drawn into this file or folder."""
    if not can_draw():
        raise BadEvaluation(
            setting="--plot", expected="drawn by matplotlib", found="that it is not installed", todo="pip install 'kvcompile[plots]'",
        )
    if to.suffix and not to.is_dir() and to.suffix.lower() not in SUFFIXES:
        raise BadEvaluation(setting="--plot", expected=f"a folder or a file of {', '.join(SUFFIXES)}", found=to, todo="name one of these")


def draw_file(results: Results, to: Path) -> list[Path]:
    """Draw quality against bytes for every scheme, and the widths of adaptive schemes; return the paths, none without schemes.

    A folder gets ``bytes.png`` and ``NAME``. A file gets the widths if there are any, with the other picture beside it
    (``name.bytes.png``), else quality against bytes.
    """
    if not results.schemes:
        return []
    into_file = to.suffix.lower() in SUFFIXES and not to.is_dir()
    widths = (to if into_file else to / NAME) if rows_of(results) else None
    quality = to / "bytes.png" if not into_file else to if widths is None else to.with_suffix(f".bytes{to.suffix}")
    quality.parent.mkdir(parents=True, exist_ok=True)
    by_bytes(results, quality)
    if widths is None:
        return [quality]
    draw_widths(results, widths)
    return [widths, quality]


def _axes(columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 4), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def accuracy(row: Measured, length: int | None = None) -> float:
    """Return the share of right answers over all tasks; ``length`` None: over all lengths."""
    return row.share(length=length).value


def by_bytes(results: Results, to: Path) -> None:
    """Draw each scheme's KL, and right answers if questions were asked, against the longest cache's share of dense bytes, into file ``to``.

    Points are labelled, and a line joins the schemes that no other beats in KL at fewer bytes. Schemes whose dense bytes are not known are
    left out. A KL below 1e-9 is drawn as 1e-9, as the axis is logarithmic.
    """
    asked = bool(results.reference.tasks)
    figure, axes = _axes(2 if asked else 1)
    lost: dict[str, tuple[float, float]] = {}
    right: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(results.schemes):
        if not row.dense_bytes:
            continue
        point = {"linestyle": "none", "markersize": 4, "linewidth": 1, **style(number)}
        held = 100 * row.cache_bytes / row.dense_bytes
        kl = results.compared(row).kl
        # A logarithmic axis cannot show zero.
        value, low, high = (max(1e-9, item) for item in (kl.value, kl.low, kl.high))
        axes[0].errorbar([held], [value], yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], **point)
        lost[row.scheme] = held, value
        if asked:
            share = row.share()
            below, above = max(0.0, share.value - share.interval[0]), max(0.0, share.interval[1] - share.value)
            axes[1].errorbar([held], [share.value], yerr=[[below], [above]], **point)
            right[row.scheme] = held, share.value
    edge = frontier(list(lost.values()))
    axes[0].plot([held for held, _ in edge], [value for _, value in edge], color="lightgray", zorder=0)
    axes[0].set(xlabel="bytes held, % of dense", ylabel="KL, nats a token", yscale="log")
    if asked:
        axes[1].axhline(accuracy(results.reference), linestyle=":", color="gray", label="uncompressed")
        axes[1].set(xlabel="bytes held, % of dense", ylabel="right answers, all tasks", ylim=(-0.02, 1.02))
        axes[1].legend(fontsize=7, loc="lower right")
    for axis, points in zip(axes, (lost, right), strict=False):
        _share_axis(axis)
        _label(axis, points)
    figure.savefig(to, dpi=120)


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bytes, KL) that no other point beats in one number without being worse in the other, by bytes."""
    best: list[tuple[float, float]] = []
    for held, value in sorted(points):
        if not best or value < best[-1][1]:
            best.append((held, value))
    return best


def _share_axis(axis: Any) -> None:
    """Make the axis of bytes logarithmic, with percents as they are written."""
    from matplotlib.ticker import NullFormatter

    low, high = axis.get_xlim()
    ticks = [tick for tick in (15, 20, 25, 30, 40, 50, 70, 100, 150, 200) if low <= tick <= high * 1.25]
    axis.set_xscale("log")
    axis.set_xlim(max(low, 1.0) * 0.85, high * 1.25)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.xaxis.set_minor_formatter(NullFormatter())


def _label(axis: Any, points: dict[str, tuple[float, float]]) -> None:
    """Write each point's name beside it, where no name stands yet: to the right, to the left, or a line above or below."""
    taken: list[tuple[float, float, float]] = []
    for name, point in sorted(points.items(), key=lambda item: item[1][::-1]):
        x, y = axis.transData.transform(point)
        width = 4.6 * len(name) + 8
        for side, lift in ((1, 0), (-1, 0), (1, 9), (-1, 9), (1, -9), (-1, -9), (1, 18), (1, -18)):
            begin = x + 4 if side > 0 else x - 4 - width
            if all(abs(y + lift - other) >= 9 or begin + width < start or begin > end for start, end, other in taken):
                break
        taken.append((begin, begin + width, y + lift))
        align = "left" if side > 0 else "right"
        axis.annotate(name, point, (4 * side, lift * 0.72), textcoords="offset points", fontsize=6, ha=align, va="center")


def by_length(results: Results, to: Path) -> None:
    """Draw each scheme's mean KL, and right answers if questions were asked, against the length of prompts, into file ``to``.

    A KL below 1e-9 is drawn as 1e-9, as the axis is logarithmic.
    """
    asked = bool(results.reference.tasks)
    figure, axes = _axes(2 if asked else 1)
    for number, row in enumerate(results.schemes):
        line = {"label": row.scheme, **style(number)}
        axes[0].plot(results.lengths, [max(1e-9, mean(text.kl)) for text in row.texts], **line)
        if asked:
            axes[1].plot(results.lengths, [accuracy(row, length) for length in results.lengths], **line)
    axes[0].set(xlabel=f"{results.config['unit']} of prompt", ylabel="KL, nats a token", yscale="log")
    if asked:
        dense = [accuracy(results.reference, length) for length in results.lengths]
        axes[1].plot(results.lengths, dense, ":", color="gray", label="uncompressed")
        axes[1].set(xlabel=f"{results.config['unit']} of prompt", ylabel="right answers, all tasks", ylim=(-0.02, 1.02))
    axes[-1].legend(fontsize=7)
    figure.savefig(to, dpi=120)


def heatmaps(results: Results, to: Path) -> None:
    """Draw right answers by depth and length into file ``to``: one row of pictures per scheme, the uncompressed cache first.

    The columns are tasks.
    """
    from matplotlib.figure import Figure

    rows, tasks = [results.reference, *results.schemes], results.reference.tasks
    figure = Figure(figsize=(2.4 * len(tasks) + 1, 1.8 * len(rows)), layout="constrained")
    places = figure.subplots(len(rows), len(tasks), squeeze=False)
    image = None
    for row, line in zip(rows, places, strict=True):
        for task, axes in zip(tasks, line, strict=True):
            depths, lengths, cells = grid(row, task)
            image = axes.imshow([[share.value for share in shares] for shares in cells], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            few = range(0, len(depths), max(1, len(depths) // 5))
            axes.set(title=f"{row.scheme}: {task}", xticks=range(len(lengths)), xticklabels=lengths)
            axes.set(yticks=list(few), yticklabels=[f"{depths[at]:.0%}" for at in few])
            axes.title.set_fontsize(7)
            axes.tick_params(labelsize=6)
    if image is not None:
        figure.colorbar(image, ax=places, shrink=0.6)
    figure.savefig(to, dpi=120)
