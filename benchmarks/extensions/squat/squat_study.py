"""squat on tinylm over lam and directions, after Table 3 of "SQuat": KL and answers with intervals, beside kivi in pairs.

    python benchmarks/extensions/squat/squat_study.py --json FILE [--parts table3,table3-pre,normalised,blocks,presets] [--lengths 1600]
            [--rows 24]
                                     [--questions 24] [--tail 32] [--print]

Everything is measured as ``kvcompile eval`` measures it: prompts are prefilled into an empty cache, and single tokens decoded from what it
holds. All settings get the same texts and questions, so a setting is compared with ``kivi`` in pairs: the difference of KL by resampling
texts, of answers by resampling questions and McNemar's exact test. Run again with the same FILE, it goes on with what is missing;
``--print`` measures nothing.

    table3       the source's form over its own lam and r, two sub-blocks a head (as 64 of 128 channels)
    table3-pre   the same with keys stored before RoPE
    normalised   lam times the mean over queries, for both
    blocks       channels that are quantized at a time
    presets      the settings that the source names, as they are
    figures      Figures 2 and 5, alone and with a FILE of its own: ``benchmarks/extensions/squat/squat_figures.py``; ``--plot PICTURE``
                 draws them
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import squat_figures
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.schemes import settings
from kvcompile.tools.cli.subjects import SHIPPED, tinylm
from kvcompile.tools.evaluation.bench import Bench, Effort, labels
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.measures import Measured, mean
from kvcompile.tools.evaluation.results import Beside, Results
from kvcompile.tools.evaluation.statistics import bootstrap

ROOT = Path(__file__).resolve().parents[3]
LAMS, RANKS = (1e-4, 5e-4, 1e-3, 1e-2, 1e-1), (5, 10, 20, 40, 60)
MEAN_LAMS, MEAN_RANKS = (0.1, 1.0, 10.0), (5, 20, 60)
BASE = "kivi"


def grid(name: str, lams: Sequence[float], ranks: Sequence[int], normalise: bool) -> tuple[str, ...]:
    """A setting for each lam and rank."""
    return tuple(f"{name}(lam={lam},rank={rank},normalise={normalise})" for rank in ranks for lam in lams)


PARTS: dict[str, tuple[str, ...]] = {
    "table3": grid("squat", LAMS, RANKS, False),
    "table3-pre": grid("squat-pre", LAMS, RANKS, False),
    "normalised": (*grid("squat", MEAN_LAMS, MEAN_RANKS, True), *grid("squat-pre", MEAN_LAMS, MEAN_RANKS, True)),
    "blocks": tuple(f"squat(lam=1.0,rank={rank},subblock={block})" for rank in (20, 60) for block in (32, 16, 8, 4)),
    "presets": tuple(name for name in settings() if name not in {"squat-pre"} and name.startswith("squat")),
}


def table_of(rows: Sequence[Measured], base: Measured, title: str) -> Table:
    """Settings one under the other."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "KL", "less kivi's", "bits a byte", "answers", "lost, won", "p", "points"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        found, share = Beside.of(row, base), row.share()
        kl, pairs = bootstrap([value for text in row.texts for value in text.kl]), found.paired["all"]
        table.add_row(
            row.scheme, f"{kl.value:.4f} ({kl.low:.4f} to {kl.high:.4f})",
            f"{found.kl.value:+.4f} ({found.kl.low:+.4f} to {found.kl.high:+.4f})", f"{row.bits_per_byte:.3f}",
            f"{share.hits}/{share.trials}", f"{pairs.lost}, {pairs.won}", f"{pairs.p:.2g}",
            f"{pairs.difference.value:+.1%} ({pairs.difference.low:+.0%} to {pairs.difference.high:+.0%})",
        )
    return table


def main() -> int:
    """Measure what is missing, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="table3,table3-pre,normalised,blocks,presets")
    parser.add_argument("--schemes", help="others than the parts', with semicolons between them")
    parser.add_argument("--lengths", default="1600", help="bytes of prompts")
    parser.add_argument("--tail", type=int, help="bytes decoded of each text (default 32; figures 400)")
    parser.add_argument("--rows", type=int, help="texts, and questions at a time (default 24; figures 8)")
    parser.add_argument("--questions", type=int, default=24, help="a task")
    parser.add_argument("--tasks", default="needle,multikey,variable")
    parser.add_argument("--inner", default="eager", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="only print what FILE holds")
    parser.add_argument("--model", default="tinylm", choices=sorted(SHIPPED), help="of figures")
    parser.add_argument("--other", type=Path, default=ROOT / "LICENSE", help="figures: text of another kind (default: LICENSE)")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="figures: draw them")
    options = parser.parse_args()
    figures = options.parts == "figures"
    options.tail, options.rows = options.tail or (400 if figures else 32), options.rows or (8 if figures else 24)
    torch.set_num_threads(options.threads)
    if figures:
        return squat_figures.run(options)
    names = options.schemes.split(";") if options.schemes else [name for part in options.parts.split(",") for name in PARTS[part]]
    wanted = labels([BASE, *names])
    results = Results.load(options.json) if options.json.exists() else None
    console = Console(width=180)
    if not options.print:
        effort = Effort(
            tuple(map(int, options.lengths.split(","))), options.tail, options.questions, batch=options.rows, inner=options.inner,
            tasks=tuple(options.tasks.split(",")), attention=False,
        )
        bench = Bench(tinylm(), effort)
        settings = {"model": "tinylm", "dtype": bench.subject.dtype, "unit": "bytes", **dataclasses.asdict(effort)}
        results = results or Results(settings, machine("cpu"), bench.reference(), ())
        for scheme, label in wanted:
            if label in {row.scheme for row in results.schemes}:
                continue
            row = bench.measure(scheme, label)
            results = dataclasses.replace(results, schemes=(*results.schemes, row))
            console.print(f"{label}: KL {mean([value for text in row.texts for value in text.kl]):.4f}, {row.share()}, {row.seconds:.0f} s")
            options.json.write_text(results_text(results))
    assert results is not None, f"{options.json} holds no run"
    held = {row.scheme: row for row in results.schemes}
    shown = [held[label] for _, label in wanted if label in held]
    share = results.reference.share()
    console.print(table_of(shown, held[BASE], f"the uncompressed model: {results.reference.bits_per_byte:.3f} bits a byte, "
                           f"{share.hits}/{share.trials} answers"))
    return 0


def results_text(results: Results) -> str:
    """All records as JSON."""
    import json

    return json.dumps(results.plain()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
