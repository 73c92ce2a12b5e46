"""Learned tables on tinylm: bits per byte before and after, of text like that they were learned on and of another kind.

    python benchmarks/extensions/beyond/beyond_study.py --json FILE [--seeds 3] [--parts sweep,ablation,window,retrieval] [--steps 60]

sweep      native, initial and trained tables over bits and groups (the source's Figure 5), on Python and on prose
ablation   levels frozen, thresholds frozen, no half-wave rectification (its Table 3), and a window of another size (its Appendix C)
retrieval  exact answers to questions about planted lines, decoded through the compiled cache, before and after

Tables are learned on Python modules of this machine that tinylm was never trained on, validated on others, and measured on further ones
("modules": text as they were learned on), on the Python that the repository ships, and on prose, documents of this machine whose names were
held out from tinylm's training; what was read is told by its hash.
Losses are of windows of 512 bytes behind a start token, by the graph that serves, with the cache-less matcher. A seed is an order of the
training text and another set of questions; there is one model. What FILE holds already is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "examples")]

from tinylm import codec, corpus

import kvcompile
from kvcompile.extensions.beyond.learning.learn import Learned, native_loss
from kvcompile.extensions.beyond.learning.loss import NextToken
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.text import Tokens, batches
from kvcompile.extensions.beyond.learning.trainer import Trainer
from kvcompile.extensions.beyond.tables import ModelTables
from kvcompile.schemes import Beyond
from kvcompile.settings import Inner
from kvcompile.tools.cli.subjects import tinylm
from kvcompile.tools.cli.targets import Options, resolve
from kvcompile.tools.evaluation.bench import Bench, Effort
from kvcompile.tools.evaluation.machine import machine
from kvcompile.tools.evaluation.results import summarised

TINYLM = HERE.parents[2] / "examples" / "tinylm"
WINDOW, ROWS = 512, 8
MOST = 8192
"""Bytes of one file: one table of numbers would be most of a small sample."""
TOKENS = Tokens(lambda text: list(text.encode()), (codec.BOS,))
SWEEP = ({"bits": 4}, {"bits": 2}, {"bits": 3}, {"bits": 5}, {"bits": 4, "group": 64})
MEASURED = ("modules", "python", "prose")
ABLATIONS: dict[str, dict[str, Any]] = {"levels frozen": {"levels": False}, "thresholds frozen": {"thresholds": False},
                                        "no half-wave": {"half_wave": False}}
WINDOWS: dict[str, dict[str, Any]] = {"window 0.007": {"window": 0.007}, "window 0.011": {"window": 0.011}}
progress = Console(stderr=True)


def held_out(kind: str) -> Iterator[bytes]:
    """Texts of files that tinylm was not trained on, by their names, in an order that the path's hash decides."""
    shipped = {line for line in map(bytes.strip, corpus.heldout_text().split(b"\n")) if len(line) >= corpus.LONG_LINE}
    found = set()
    for root in corpus.roots():
        for folder, _, names in os.walk(root):
            found |= {Path(folder, name) for name in names if corpus.kind_of(name) == kind and corpus.is_held_out(Path(folder, name))}
    for path in sorted(found, key=lambda item: hashlib.sha256(str(item).encode()).digest()):
        try:
            text = path.read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        lines = [line for line in map(bytes.strip, text.split(b"\n")) if len(line) >= corpus.LONG_LINE]
        if corpus.FEWEST_FILE_BYTES <= len(text) <= corpus.MOST_FILE_BYTES and sum(line in shipped for line in lines) <= 0.05 * len(lines):
            yield text


def take(texts: Iterator[bytes], count: int) -> bytes:
    """The first ``count`` bytes of the beginnings of texts behind each other: of no file more than ``MOST``."""
    made = b""
    while len(made) < count:
        text = next(texts, None)
        if text is None:
            raise SystemExit(f"this machine holds {len(made)} bytes of such text, and {count} are needed")
        made += text[:MOST].decode(errors="ignore").encode()
    return made[:count]


def windows(text: bytes) -> list[list[int]]:
    """Runs of bytes that with the start token are a window."""
    room = WINDOW - 1
    return [list(text[at : at + room]) for at in range(0, len(text) - room + 1, room)]


@dataclasses.dataclass(frozen=True)
class Data:
    """Runs of bytes to learn from and to validate on, and batches to measure on by kind."""

    training: list[list[int]]
    validation: list[dict[str, torch.Tensor]]
    measured: dict[str, list[dict[str, torch.Tensor]]]
    told: dict[str, str]

    @staticmethod
    def read(training: int, validation: int, measured: int) -> Data:
        """Read so many bytes of each."""
        python, prose = held_out("python"), held_out("prose")
        texts = {"validation": take(python, validation), "modules": take(python, measured), "training": take(python, training),
                 "prose": take(prose, measured), "python": corpus.heldout_text()[:measured]}
        told = {name: f"{len(text)} bytes, {hashlib.sha256(text).hexdigest()[:12]}" for name, text in texts.items()}
        parts = {name: batches(windows(text), TOKENS, ROWS) for name, text in texts.items() if name != "training"}
        return Data(windows(texts["training"]), parts["validation"], {name: parts[name] for name in MEASURED}, told)

    def order(self, seed: int, sequences: int) -> list[dict[str, torch.Tensor]]:
        """The training batches in a seed's order, gone through as often as it takes for so many sequences."""
        runs = list(self.training)
        random.Random(seed).shuffle(runs)
        once = batches(runs, TOKENS, ROWS)
        return once * -(-sequences // max(1, ROWS * len(once)))


class Study:
    """Rows that were measured, written as they come."""

    def __init__(self, path: Path, settings: LearnSettings, data: Data, device: str) -> None:
        self.path, self.settings, self.data, self.device = path, settings, data, device
        self.model = resolve(str(TINYLM), Options(dtype=torch.float32, device=device)).model.requires_grad_(False)
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
        # What the rows stand for, beside what each of them says.
        self.content |= {"torch": torch.__version__, "text": data.told, "settings": settings.plain(), "machine": machine(device)}

    def known(self, **key: Any) -> dict[str, Any] | None:
        """The row of a key that was measured before."""
        return next((row for row in self.content["rows"] if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, **row: Any) -> None:
        """Keep a row."""
        self.content["rows"].append(row)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        progress.print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})

    def bits(self, scheme: Beyond | None, kind: str) -> float:
        """Bits per byte under a scheme's tables, of the model as it is where there is none."""
        found = self.data.measured[kind]
        if scheme is None:
            return native_loss(self.model, found) / math.log(2)
        torch._dynamo.reset()
        plain = Beyond(scheme.bits, scheme.group, scheme.scale_dtype)
        trainer = Trainer(self.model, plain, self.settings, NextToken(self.model))
        trainer.meet(found[0])
        if isinstance(scheme.tables, ModelTables):
            trainer.parameters.load(scheme.tables)
        return trainer.validate(found) / math.log(2)

    def before(self) -> None:
        """Bits per byte of the model as it is."""
        for kind in self.data.measured:
            if self.known(part="native", kind=kind) is None:
                self.add(part="native", kind=kind, bits=self.bits(None, kind))

    def learned(self, scheme: Beyond, settings: LearnSettings, seed: int) -> Learned:
        """Learn the tables of one setting."""
        found: list[Learned] = []
        torch._dynamo.reset()
        kvcompile.learn(
            self.model, self.data.order(seed, settings.steps * settings.batch), scheme, validation=self.data.validation, settings=settings,
            told=found.append, quiet=True,
        )
        return found[0]

    def trained(self, part: str, label: str, options: dict[str, Any], change: dict[str, Any], seed: int) -> Beyond | None:
        """Measure one setting before and after; None where it was measured before."""
        if self.known(part=part, label=label, seed=seed, **options) is not None:
            return None
        scheme, started = Beyond(**options), time.perf_counter()
        went = self.learned(scheme, dataclasses.replace(self.settings, **change), seed)
        seconds = time.perf_counter() - started
        figures = {f"{name}_{kind}": self.bits(held, kind) for kind in self.data.measured
                   for name, held in (("initial", scheme), ("trained", went.scheme))}
        self.add(part=part, label=label, seed=seed, **options, steps=went.steps, best_step=went.best_step, stopped=went.stopped,
                 validations=[loss / math.log(2) for _, loss in went.validations], seconds=seconds, **figures)
        return went.scheme

    def retrieval(self, options: dict[str, Any], seed: int, effort: Effort) -> None:
        """Answers before and after, through the compiled cache."""
        if self.known(part="retrieval", seed=seed, **options) is not None:
            return
        trained = self.learned(Beyond(**options), self.settings, seed).scheme
        bench = Bench(tinylm(self.device), dataclasses.replace(effort, seed=seed))
        for label, scheme in (("dense", "dense"), ("initial", Beyond(**options)), ("trained", trained)):
            self.add(part="retrieval", label=label, seed=seed, **options, **summarised(bench.measure(scheme, label)))


def table(content: dict[str, Any]) -> str:
    """Rows as Markdown, means over seeds with the half-width of their 95% interval."""
    native = {row["kind"]: row["bits"] for row in content["rows"] if row["part"] == "native"}
    heads = " | ".join(f"{kind}, {name}" for kind in MEASURED for name in ("initial", "trained"))
    lines = ["native: " + ", ".join(f"{kind} {native[kind]:.4f}" for kind in MEASURED) + " bits per byte", "", f"| | seeds | {heads} |",
             "|---|---|" + "---|" * 2 * len(MEASURED)]
    measured = [row for row in content["rows"] if row["part"] in {"sweep", "ablation"}]
    for label in dict.fromkeys(row["label"] for row in measured):
        rows = [row for row in measured if row["label"] == label]
        cells = [_interval([row[f"{name}_{kind}"] for row in rows]) for kind in MEASURED for name in ("initial", "trained")]
        lines.append(f"| {label} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2 or max(values) == min(values):
        return f"{mean:.4f}"
    # Student's t, 95%, for two to five values.
    factor = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.0)
    return f"{mean:.4f} +- {factor * statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parts", default="sweep,ablation,retrieval")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3, help="the source's is 7e-4, for five times as many steps")
    parser.add_argument("--ablate", type=int, default=2, help="bits that ablations and retrieval are of")
    parser.add_argument("--bytes", type=int, default=32768, help="measured of each kind")
    parser.add_argument("--inner", default="eager", choices=[item.value for item in Inner])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=ROWS, help="sequences a step; the source's is 32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = LearnSettings(steps=arguments.steps, batch=arguments.batch, rate=arguments.rate, inner=Inner.of(arguments.inner))
    data = Data.read(training=WINDOW * ROWS * 120, validation=WINDOW * ROWS * 6, measured=arguments.bytes)
    study, parts = Study(arguments.json, settings, data, arguments.device), arguments.parts.split(",")
    study.before()
    for seed in range(arguments.seeds):
        for options in SWEEP if "sweep" in parts else ():
            label = f"{options['bits']} bits, groups of {options.get('group', 32)}"
            study.trained("sweep", label, options, {}, seed)
        chosen = {"bits": arguments.ablate}
        changes = (ABLATIONS if "ablation" in parts else {}) | (WINDOWS if "window" in parts else {})
        for label, change in changes.items():
            study.trained("ablation", f"{arguments.ablate} bits, {label}", chosen, change, seed)
        if "retrieval" in parts:
            study.retrieval(chosen, seed, Effort((600,), tail=32, questions=24, inner="eager", attention=False))
    sys.stdout.write(table(study.content) + "\n")


if __name__ == "__main__":
    main()
