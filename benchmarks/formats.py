"""Formats of equal bytes beside each other on tinylm: rotated channels, exact first tokens, four-bit tables, normed two-bit keys.

    python benchmarks/formats.py --json FILE [--part two|four|token|all] [--context N] [--texts N] [--questions N] [--model FOLDER]
    python benchmarks/formats.py --json FILE --compare

Every scheme is measured as ``kvcompile eval`` measures it, beside the uncompressed model, and FILE is written after each; what FILE has
already is not measured again. ``--compare`` prints a row for each pair: bytes held, the difference of KL over the same texts with its
95% interval (paired bootstrap), questions that one of the two answered alone, and McNemar's exact p, not corrected for the number of pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvcompile.report import short_scheme
from kvcompile.schemes import parse
from kvcompile.tools.cli.subjects import TINYLM, tinylm
from kvcompile.tools.evaluation.bench import Bench, Effort, labels
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.measures import Measured
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.statistics import Paired, bootstrap

Pair = tuple[str, str]
NORMS = "kivi(sinks=8)"
"""As many bytes at 2,000 tokens as ``normed`` has: the norms of its keys are two bytes a token."""

PARTS: dict[str, tuple[Pair, ...]] = {
    "two": (
        ("kivi", "kivi(rotate=k)"), ("kivi", "kivi(rotate=kv)"), ("kivi(window=64)", "kivi(sinks=32)"), (NORMS, "normed"),
        (NORMS, "normed(rotate=none)"), ("normed", "normed(rotate=kv)"), ("normed", "normed(turn=queries)"),
        ("normed", "normed(turn=both)"),
        ("normed(window=64)", "normed(sinks=32)"), ("kivi(sinks=32)", "normed(sinks=32)"),
    ),
    "four": (
        ("int4", "int4(rotate=k)"), ("int4", "int4(rotate=kv)"), ("int4", "nf4"), ("nf4", "nf4(rotate=kv)"),
        ("int4(rotate=kv)", "nf4(rotate=kv)"),
    ),
    "token": (
        ("int4(granularity=token)", "int4(granularity=token,rotate=k)"), ("int4(granularity=token)", "int4(granularity=token,rotate=kv)"),
        ("int4(granularity=token,rotate=k)", "int4(granularity=token,rotate=k,sinks=8)"), ("kivi(bits=4)", "kivi(bits=4,rotate=k)"),
    ),
}
"""Pairs of schemes: of equal bytes, or of as many more as the row says; the first is what the second is held against."""


def schemes(parts: list[str]) -> list[str]:
    """The schemes of some parts, each once."""
    return list(dict.fromkeys(name for part in parts for pair in PARTS[part] for name in pair))


def measure(arguments: argparse.Namespace, names: list[str]) -> Results:
    """Measure what FILE has not, and write it after every scheme."""
    torch.set_num_threads(arguments.threads)
    effort = Effort(
        (arguments.context,), arguments.tail, arguments.questions, batch=arguments.texts, inner=arguments.inner, attention=False
    )
    subject = tinylm("cuda" if torch.cuda.is_available() else "cpu", folder=arguments.model)
    settings = json.loads(json.dumps({"model": subject.name, "dtype": subject.dtype, "unit": "bytes", **dataclasses.asdict(effort)}))
    known = Results.load(arguments.json) if arguments.json.exists() else None
    if known is not None and known.config != settings:
        raise SystemExit(f"{arguments.json} was measured with other settings: {known.config}")
    done = {item.scheme for item in known.schemes} if known else set()
    missing = [(scheme, label) for scheme, label in labels(names) if label not in done]
    if known is not None and not missing:
        return known
    bench, progress = Bench(subject, effort), Console(stderr=True)
    results = known or Results(settings, machine(subject.device), bench.reference(), ())
    for scheme, label in missing:
        row: Measured = bench.measure(scheme, label)
        results = dataclasses.replace(results, schemes=(*results.schemes, row))
        arguments.json.write_text(json.dumps(results.plain(), indent=1) + "\n")
        right = sum(answer.right for answer in row.answers)
        progress.print(f"{label}: KL {row.kl:.4f}, {right} of {len(row.answers)} answers, {row.seconds:.0f} s")
    return results


def compare(results: Results) -> Table:
    """A row for each pair that was measured."""
    found = {item.scheme: item for item in results.schemes}
    table = Table(title=f"{results.config['model']}, prompts of {results.lengths[0]:,} bytes, {results.machine}")
    for column in ("first", "second", "bytes", "KL, nats", "KL of the second less the first", "answers", "lost, won", "p", "points"):
        table.add_column(column, justify="right" if column != "first" else "left")
    for one, other in (pair for part in PARTS.values() for pair in part):
        a, b = (found.get(short_scheme(parse(name))) for name in (one, other))
        if a is None or b is None:
            continue
        kl = [[value for text in item.texts for value in text.kl] for item in (a, b)]
        apart = bootstrap([y - x for x, y in zip(*kl, strict=True)])
        paired = Paired.of([answer.right for answer in a.answers], [answer.right for answer in b.answers])
        share = [item.held[0].allocated / item.held[0].dense for item in (a, b)]
        right = [sum(answer.right for answer in item.answers) for item in (a, b)]
        table.add_row(
            a.scheme, b.scheme, f"{share[0]:.1%} {share[1]:.1%}", f"{a.kl:.4f} {b.kl:.4f}",
            f"{apart.value:+.4f} ({apart.low:+.4f} to {apart.high:+.4f})", f"{right[0]} {right[1]} of {paired.trials}",
            f"{paired.lost}, {paired.won}", f"{paired.p:.2g}",
            f"{100 * paired.difference.value:+.1f} ({100 * paired.difference.low:+.1f} to {100 * paired.difference.high:+.1f})",
        )
    return table


def main() -> int:
    """Measure, or compare what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--schemes", help="others than the part's, with semicolons between them")
    parser.add_argument("--compare", action="store_true", help="print pairs of what was measured, and measure nothing")
    parser.add_argument("--model", type=Path, default=TINYLM, help="another model of bytes")
    parser.add_argument("--context", type=int, default=2000, help="bytes of a prompt")
    parser.add_argument("--texts", type=int, default=16, help="texts, and questions at a time")
    parser.add_argument("--tail", type=int, default=32, help="bytes decoded of each text")
    parser.add_argument("--questions", type=int, default=48, help="a task")
    parser.add_argument("--inner", default="eager", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    names = arguments.schemes.split(";") if arguments.schemes else schemes(list(PARTS) if arguments.part == "all" else [arguments.part])
    results = Results.load(arguments.json) if arguments.compare else measure(arguments, names)
    Console(width=200).print(compare(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
