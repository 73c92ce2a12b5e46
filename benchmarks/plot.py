"""Draws what a benchmark measured: speedup over cuDNN's SDPA, and the share of the roof, against the length of the past.

    python benchmarks/plot.py benchmarks/attention_h200.json picture.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def draw(figures: Path, picture: Path) -> None:
    """One line a scheme and batch size; raises ImportError with what to install where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'kvcompile[plots]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    read = json.loads(Path(figures).read_text())
    rows = read["rows"] if isinstance(read, dict) else read
    rows = [row for row in rows if "speedup_cudnn" in row]
    if not rows:
        raise ValueError(f"{figures} has no rows with a speedup over SDPA: draw what `bench attention` measured")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for axis, key, title in zip(axes, ("speedup_cudnn", "roof_share"), ("times as fast as cuDNN SDPA", "share of the roof"), strict=True):
        for scheme in dict.fromkeys(row["scheme"] for row in rows):
            for batch, style in zip(dict.fromkeys(row["batch"] for row in rows), ("o-", "s--", "^:"), strict=False):
                points = sorted((row["tokens"], row[key]) for row in rows if row["scheme"] == scheme and row["batch"] == batch)
                if points:
                    axis.plot(*zip(*points, strict=True), style, label=f"{scheme}, batch {batch}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in the cache")
        axis.set_title(title)
        axis.axhline(1.0, color="gray", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    device = read.get("device", "") if isinstance(read, dict) else ""
    figure.suptitle(f"one new token, {device}".rstrip(", "))
    figure.tight_layout()
    figure.savefig(picture, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
