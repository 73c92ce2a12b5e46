"""Public: a checkpoint in a local folder through lm-evaluation-harness with every scheme, each paired with dense on the same documents.

    make public MODEL=/models/Llama-3.1-8B-Instruct ARGS='--out llama'
    python -m benchmarks.public MODEL --schemes 'int8;int4(window=32);squat' --tasks gsm8k,ruler --lengths 4096,16384 --out DIR

The harness (``pip install 'kvcompile[lm-eval]'``) loads RULER, LongBench-E and its other tasks, from its own folder or ``--include``; data
that is not on this machine is fetched by the harness. Each scheme's samples are written to ``DIR/SCHEME.json`` as soon as it is measured; a
second run reads them and measures the others. ``DIR/table.md`` and ``DIR/table.csv`` have a cell for each task and scheme of the list: the
mean, and its difference from dense with a 95% bootstrap interval over documents; "not run" where there is none.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvcompile.tools.cli.subjects import tokenizer_of
from kvcompile.tools.cli.targets import TargetOptions, resolve, static_cache
from kvcompile.tools.evaluation.harness import harness_model
from kvcompile.tools.evaluation.statistics import Mean, bootstrap

TASKS = ("gsm8k", "arc_challenge", "ruler", "longbench_e")
SCHEMES = ("dense", "fp8", "int8", "int4", "int4(window=32)", "gauss", "kivi", "squat")
NOT_RUN = "not run"
Scores = Mapping[str, Mapping[str, float]]
"""A score for each document, by task and metric, then by the document's number."""


@dataclass(frozen=True)
class Cell:
    """A task under a scheme: the mean of its documents, and of their differences from dense where dense was measured on the same ones."""

    mean: Mean
    difference: Mean | None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.mean.value:.3f}"
        return f"{self.mean.value:.3f} ({self.difference.value:+.3f}, {self.difference.low:+.3f} to {self.difference.high:+.3f})"


def scores_of(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the scores of the harness's logged samples, by ``task/metric`` and document; of several filters' samples, the first filter's.

    RULER's samples have one metric for each length and -1 where a document has another length: such values are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for task, rows in samples.items():
        filters = [row.get("filter", "none") for row in rows]
        for row, name in zip(rows, filters, strict=True):
            if name != filters[0]:
                continue
            for metric in row.get("metrics", ()):
                value = row.get(metric)
                if isinstance(value, bool | int | float) and value >= 0:
                    found.setdefault(f"{task}/{metric}", {})[str(row["doc_id"])] = float(value)
    return found


def cell(scores: Scores | None, dense: Scores | None, task: str) -> Cell | None:
    """Return a task's cell under a scheme with these scores, None if it was not run; differences are over common documents."""
    found = (scores or {}).get(task)
    if not found:
        return None
    other = (dense or {}).get(task, {})
    common = sorted(found.keys() & other.keys())
    difference = bootstrap([found[name] - other[name] for name in common]) if common and scores is not dense else None
    return Cell(bootstrap(list(found.values())), difference)


def table(measured: Mapping[str, Scores], schemes: Sequence[str], missing: Sequence[str]) -> list[list[str]]:
    """Return rows of text: a header, then a row for each measured task and metric and for each of the tasks that nothing was run of."""
    tasks = sorted({task for scores in measured.values() for task in scores})
    dense = measured.get("dense")
    rows = [[task, *(str(cell(measured.get(scheme), dense, task) or NOT_RUN) for scheme in schemes)] for task in tasks]
    return [["task", *schemes], *rows, *([task, *(NOT_RUN for _ in schemes)] for task in missing)]


def file_of(folder: Path, scheme: str) -> Path:
    """Return the file of a scheme's samples; the text of a scheme gives it its name."""
    return folder / (re.sub(r"[^A-Za-z0-9.=]+", "-", scheme).strip("-") + ".json")


@functools.cache
def loaded(path: str, dtype: torch.dtype | None, device: str) -> tuple[torch.nn.Module, Any]:
    """Return a checkpoint's model and tokenizer, loaded once for all schemes."""
    return resolve(path, TargetOptions(dtype=dtype, device=device)).model, tokenizer_of(path)


def measure(options: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """Run the harness's tasks over one scheme and return what is written down: scores, settings, seconds, bytes held, versions."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = loaded(options.model, getattr(torch, options.dtype) if options.dtype else None, device)
    lm = harness_model(
        model, tokenizer, scheme, cache=lambda tokens: static_cache(model, tokens), max_length=options.max_length,
        inner=options.inner,
    )
    metadata = {"pretrained": options.model, "max_seq_lengths": options.lengths}
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=options.include, metadata=metadata)
    start = time.perf_counter()
    results = importlib.import_module("lm_eval").simple_evaluate(
        model=lm, tasks=options.tasks, limit=options.limit, log_samples=True, bootstrap_iters=0, task_manager=manager, metadata=metadata,
        apply_chat_template=options.chat,
    )
    said = lm.backend.report()
    return {
        "scheme": scheme, "model": Path(options.model).name, "tasks": options.tasks, "limit": options.limit,
        "max_length": options.max_length, "inner": options.inner, "seconds": time.perf_counter() - start,
        "sites": said.sites, "report": str(said),
        "scores": scores_of(results["samples"]),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "lm_eval", "kvcompile")},
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }


def write(folder: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a table as Markdown and as CSV."""
    rows = list(rows)
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    (folder / "table.md").write_text("\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public", description="a checkpoint under every scheme, paired with dense")
    parser.add_argument("model", help="a local folder with a checkpoint and its tokenizer, a GGUF file, or smollm2")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="separated by semicolons; dense is measured first")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of lm-evaluation-harness, separated by commas")
    parser.add_argument("--include", type=Path, help="a folder with more tasks of the harness")
    parser.add_argument("--lengths", default="4096", help="of RULER's prompts, in tokens")
    parser.add_argument("--max-length", type=int, help="tokens of a prompt and its answer (default: the model's positions)")
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: the checkpoint's own")
    parser.add_argument("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument("--out", type=Path, required=True, help="a folder for samples and tables; what it holds is not measured again")
    options = parser.parse_args(given)
    options.schemes = list(dict.fromkeys(["dense", *(text.strip() for text in options.schemes.split(";"))]))
    options.tasks = options.tasks.split(",")
    options.lengths = [int(text) for text in options.lengths.split(",")]
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Measure the schemes that the folder does not hold yet, and write the table; 1 where a scheme failed, with its error shown."""
    options, console = arguments(given), Console()
    options.out.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Scores] = {}
    missing, failed = list(options.tasks), 0
    for scheme in options.schemes:
        file = file_of(options.out, scheme)
        if not file.exists():
            try:
                file.write_text(json.dumps(measure(options, scheme), indent=1))
            except Exception as error:
                # A scheme that this model's shape refuses is a cell "not run"; the others go on.
                console.print(f"{scheme}: {NOT_RUN}: {error}", markup=False, highlight=False)
                failed += 1
                continue
        held = json.loads(file.read_text())
        measured[scheme] = held["scores"]
        missing = [task for task in missing if task not in held["tasks"]]
        write(options.out, table(measured, options.schemes, missing))
    console.print((options.out / "table.md").read_text() if measured else NOT_RUN, markup=False, soft_wrap=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
