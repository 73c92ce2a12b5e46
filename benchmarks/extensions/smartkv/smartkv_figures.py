"""Statistics, choices and tables of ``benchmarks/extensions/smartkv/smartkv_quality.py``; nothing here runs a model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]
RESAMPLES = 10_000


def starts(characters: int, window: int, seeds: int, texts: int) -> list[list[int]]:
    """Return the offsets of each seed's texts in a file. The file is cut into strata; a text begins in the first half of one.

    Strata go to seeds in turn. The last bytes of two texts never overlap where a stratum is twice as long as they are.
    """
    count = seeds * texts
    stratum = (characters - window) / count
    if stratum < 2:
        raise ValueError(f"{count} texts of {window} bytes do not fit into {characters}: pass fewer")
    found: list[list[int]] = [[] for _ in range(seeds)]
    for number in range(count):
        seed = number % seeds
        jitter = random.Random(f"{seed}:{number}:{window}").uniform(0, 0.5)
        found[seed].append(int((number + jitter) * stratum))
    return found


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the mean of ``values``, by resampling them."""
    drawn = _resampled(torch.tensor(values, dtype=torch.float64), seed)
    return _ends(drawn)


def bootstrap_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """mean(ours) / mean(theirs) with its 95% interval, by resampling texts, both sides alike."""
    both = torch.tensor([ours, theirs], dtype=torch.float64)
    drawn = _resampled(both, seed)
    return (float(both[0].mean() / both[1].mean()), *_ends(drawn[0] / drawn[1]))


def _resampled(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Means over the last dim of ``RESAMPLES`` resamplings."""
    count = values.shape[-1]
    picked = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    return values[..., picked].mean(-1)


def _ends(drawn: torch.Tensor) -> tuple[float, float]:
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    p, z = hits / trials, 1.96
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def mixture(harm: Sequence[Mapping[str, float]], share: Mapping[str, float], limit: float) -> tuple[str, ...] | None:
    """One scheme a layer, with the least sum of harm while the mean of their shares stays within ``limit``; None where none does.

    ``harm``: by layer, what the scheme does there alone; ``share``: bytes of a scheme. All combinations are tried.
    """
    found = [
        (sum(of[name] for of, name in zip(harm, names, strict=True)), names) for names in itertools.product(share, repeat=len(harm))
        if sum(share[name] for name in names) <= limit * len(harm) * (1 + 1e-9)
    ]
    return min(found)[1] if found else None


def budget_for(held: Callable[[float], float], target: float, least: float, most: float = 0.999, within: float = 0.005) -> float | None:
    """The budget at which ``held`` is ``target``: secants on a function that grows, four at most; None where the least holds more."""
    budget = min(max(target, least), most)
    found = held(budget)
    if found > target * (1 + within) and budget <= least:
        return None
    tried = [(budget, found)]
    best = tried[0]
    for _ in range(3):
        if abs(best[1] / target - 1) <= within:
            break
        (b0, h0), (b1, h1) = tried[-2:] if len(tried) > 1 else ((0.0, 0.0), tried[-1])
        slope = (h1 - h0) / (b1 - b0) if b1 != b0 and h1 != h0 else 1.0
        budget = min(max(b1 + (target - h1) / max(slope, 0.3), least), most)
        if any(budget == b for b, _ in tried):
            break
        tried.append((budget, held(budget)))
        best = min(tried, key=lambda item: abs(item[1] - target))
    return best[0]


def pairs(rows: Sequence[Row], within: float = 0.025) -> dict[str, list[str]]:
    """By the label of every row of smartkv that adapts, those of the other schemes that hold as many bytes."""
    others = [row for row in rows if not adapts(row)]
    return {
        row["label"]: [other["label"] for other in others if abs(other["held"] / row["held"] - 1) <= within] for row in rows if adapts(row)
    }


def changes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """By label: the row without a change for every changed one, which begins with its spelling, and what does not adapt for that one."""
    base = min((row["label"] for row in rows if adapts(row)), key=len)
    fixed = [row["label"] for row in rows if not adapts(row)]
    return {row["label"]: [base] if row["label"] != base else fixed for row in rows if adapts(row)}


def adapts(row: Row) -> bool:
    """Whether attention decides widths."""
    return row["family"].startswith("smartkv") and row["family"] != "smartkv, one width"


def text_table(rows: Sequence[Row], versus: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of what texts showed; ``versus``: by label, the rows whose KL its own is divided by."""
    by = {row["label"]: row for row in rows}
    lines = ["| | bytes held | KL, nats | bits per byte | same next byte | KL over that of |", "|---|---|---|---|---|---|"]
    for row in rows:
        low, high = bootstrap(row["kl"])
        told = []
        for other in (by[label] for label in versus.get(row["label"], ())):
            ratio = bootstrap_ratio(row["kl"], other["kl"])
            told.append(f"`{other['label']}`: {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f}), {seeds_won(row, other)}")
        lines.append(
            f"| `{row['label']}` | {row['held']:.3f} | {mean(row['kl']):.4f} ({low:.4f} to {high:.4f}) | {mean(row['bits']):.3f} |"
            f" {mean(row['same']):.3f} | {'; '.join(told)} |"
        )
    return "\n".join(lines)


def seeds_won(row: Row, other: Row) -> str:
    """In how many seeds the mean KL of ``row`` is below that of ``other``."""
    seeds = sorted(set(row["seed"]))
    won = sum(mean(of_seed(row, seed)) < mean(of_seed(other, seed)) for seed in seeds)
    return f"{won} of {len(seeds)} seeds"


def of_seed(row: Row, seed: int) -> list[float]:
    """The KL of the texts of one seed."""
    return [kl for kl, its in zip(row["kl"], row["seed"], strict=True) if its == seed]


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def task_table(rows: Sequence[Row]) -> str:
    """A Markdown table of tasks: hits of trials with Wilson's interval."""
    tasks = list(dict.fromkeys(task for row in rows for task in row["tasks"]))
    lines = ["| | bytes held | " + " | ".join(tasks) + " |", "|---|---|" + "---|" * len(tasks)]
    for row in rows:
        cells = []
        for task in tasks:
            hits, trials = row["tasks"].get(task, (0, 0))
            low, high = wilson(hits, trials) if trials else (0.0, 1.0)
            cells.append(f"{hits} of {trials} ({low:.0%} to {high:.0%})" if trials else "")
        lines.append(f"| `{row['label']}` | {row['held']:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], picture: Path) -> None:
    """KL against bytes held, a panel a length, a mark a family; raises ImportError with what to install where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'kvcompile[plots]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({row["length"] for row in rows})
    styles = {family: (f"C{number}", "os^Dv*PX<>"[number % 10]) for number, family in enumerate(sorted({row["family"] for row in rows}))}
    figure, axes = plt.subplots(1, len(lengths), figsize=(5 * len(lengths), 4.2), squeeze=False, sharey=True)
    for axis, length in zip(axes[0], lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        for family in sorted({row["family"] for row in here}):
            color, mark = styles[family]
            some = sorted((row for row in here if row["family"] == family), key=lambda row: row["held"])
            ends = [bootstrap(row["kl"]) for row in some]
            middle = [mean(row["kl"]) for row in some]
            spread = [[abs(m - end[side]) for m, end in zip(middle, ends, strict=True)] for side in (0, 1)]
            held = [row["held"] for row in some]
            axis.errorbar(held, middle, spread, fmt=mark + ":", color=color, label=family, markersize=5, linewidth=0.8)
        axis.set_yscale("log")
        axis.set_title(f"{length:,} bytes of prompt")
        axis.set_xlabel("bytes held, of 16 bits")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL from the uncompressed model, nats")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)
    plt.close(figure)
