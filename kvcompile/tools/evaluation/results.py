"""Results: all measurements of one run of evaluation, compared with the uncompressed model, as JSON and CSV.

    results.json   everything, including each model's answers; ``Results.load`` reads it
    summary.csv    one row per scheme, length and task
    answers.csv    one row per question and scheme
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.errors import BadEvaluation, FileUnfit, ResultsUnread
from kvcompile.files.declared import as_declared
from kvcompile.files.json_file import read_json
from kvcompile.tools.evaluation.measures import Answer, Held, Measured, plain
from kvcompile.tools.evaluation.statistics import Mean, Paired, bootstrap

FORMAT = 1


@dataclass(frozen=True)
class Compared:
    """The comparison of one scheme with the uncompressed model.

    It holds means over texts with bootstrap intervals, and outcomes of the same questions.
    """

    kl: Mean
    bits: Mean
    paired: dict[str, Paired]
    """By task, and under ``all`` for all tasks."""
    discordant: tuple[dict[str, Any], ...]
    """Questions that exactly one of the two answered right."""

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain data, for JSON."""
        return {
            "kl": self.kl.plain(), "bits_per_byte_more": self.bits.plain(),
            "paired": {name: item.plain() for name, item in self.paired.items()}, "discordant": list(self.discordant),
        }


@dataclass(frozen=True)
class PairedComparison:
    """The comparison of one scheme with another on the same texts and questions.

    ``kl``, ``bits``: the scheme's minus the other's, nats per token and bits per byte, means over texts with bootstrap intervals.
    ``paired``: outcomes by task, and under ``all`` for all tasks; a question that only the other scheme answered right counts as lost.
    """

    kl: Mean
    bits: Mean
    paired: dict[str, Paired]

    @classmethod
    def of(cls, scheme: Measured, other: Measured, seed: int = 0) -> PairedComparison:
        """Return the comparison of two schemes' measurements; intervals resample texts and questions from ``seed``."""
        pairs = list(zip(other.answers, scheme.answers, strict=True))
        groups = {"all": pairs} | {task: [pair for pair in pairs if pair[0].task == task] for task in scheme.tasks}
        more = {
            name: [
                ours - theirs for mine, their in zip(scheme.texts, other.texts, strict=True)
                for ours, theirs in zip(getattr(mine, name), getattr(their, name), strict=True)
            ] for name in ("kl", "bits")
        }
        paired = {name: Paired.of([one.right for one, _ in held], [two.right for _, two in held], seed) for name, held in groups.items()}
        return cls(bootstrap(more["kl"], seed), bootstrap(more["bits"], seed), paired)

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain data, for JSON."""
        return {
            "kl_more": self.kl.plain(), "bits_per_byte_more": self.bits.plain(),
            "paired": {name: item.plain() for name, item in self.paired.items()},
        }


@dataclass(frozen=True)
class Results:
    """Settings and machine of a run, the reference, and every scheme."""

    config: dict[str, Any]
    machine: dict[str, Any]
    reference: Measured
    schemes: tuple[Measured, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of prompts, in the order in which texts were measured."""
        return tuple(text.length for text in self.reference.texts)

    def compared(self, scheme: Measured) -> Compared:
        """Return the comparison of a scheme with the reference; intervals use the run's seed."""
        # The reference has a KL of zero, so the difference is the scheme's own KL.
        found = self.beside(scheme, self.reference)
        differing = discordant(list(zip(self.reference.answers, scheme.answers, strict=True)))
        return Compared(found.kl, found.bits, found.paired, tuple(differing))

    def beside(self, scheme: Measured, other: Measured) -> PairedComparison:
        """Return the comparison of a scheme with another one of the run."""
        return PairedComparison.of(scheme, other, int(self.config.get("seed", 0)))

    def named(self, label: str) -> Measured:
        """Return the scheme with this label. Raises BadEvaluation if there is none."""
        for row in self.schemes:
            if row.scheme == label:
                return row
        held = ", ".join(row.scheme for row in self.schemes)
        raise BadEvaluation(setting="--beside", expected=f"a scheme of the run ({held})", found=label, todo="add it to --schemes")

    def plain(self) -> dict[str, Any]:
        """Return the results as plain data, for JSON: each scheme's summary, then its records."""
        return {
            "format": FORMAT, "config": self.config, "machine": self.machine, "reference_bits_per_byte": self.reference.bits_per_byte,
            "reference": measured_plain(self.reference),
            "schemes": [measured_plain(item) | {"compared": self.compared(item).plain()} for item in self.schemes],
        }

    def save(self, folder: Path) -> None:
        """Write JSON and CSV into a folder, creating it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self.plain(), indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps({"config": self.config, "machine": self.machine}, indent=1) + "\n")
        (folder / "summary.csv").write_text(as_csv(self.summary_rows()))
        (folder / "answers.csv").write_text(as_csv(self.answer_rows()))

    @staticmethod
    def load(path: Path) -> Results:
        """Return the results in a results.json. Raises ResultsUnread if the file is not one of this version."""
        try:
            read = read_json(path, dict[str, Any])
            if read.get("format") != FORMAT:
                raise ResultsUnread(path=path, found=f"format {read.get('format')}, not {FORMAT}")
            return as_declared(Results, {
                "config": read.get("config"), "machine": read.get("machine"), "reference": _known(read.get("reference")),
                "schemes": [_known(row) for row in as_declared(list[Any], read.get("schemes"), "schemes")],
            }, path.name)
        except FileUnfit as error:
            raise ResultsUnread(path=path, found=error.fact) from error

    def summary_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each scheme, length and task."""
        for item in (self.reference, *self.schemes):
            held = {each.length: each for each in item.held}
            for text in item.texts:
                size = held.get(text.length, Held(text.length, 0, 0))
                figures = {
                    "bits_per_byte": sum(text.bits) / len(text.bits), "kl": sum(text.kl) / len(text.kl), "same": sum(text.same),
                    "predictions": text.predictions * len(text.same), "allocated": size.allocated, "dense": size.dense,
                }
                for task in item.tasks or ("",):
                    share = item.share(task, text.length)
                    yield {
                        "scheme": item.scheme, "length": text.length, **figures, "task": task, "right": share.hits,
                        "questions": share.trials, "low": share.interval[0], "high": share.interval[1],
                    }

    def answer_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each question and scheme, the uncompressed model's first."""
        for item in (self.reference, *self.schemes):
            for answer in item.answers:
                yield {"scheme": item.scheme, **plain(answer)}


def discordant(pairs: list[tuple[Answer, Answer]]) -> Iterator[dict[str, Any]]:
    """Yield the questions that exactly one of two models answered right.

    ``kind``: "lost" if the uncompressed model, the first of each pair, was right; else "won".
    """
    for dense, scheme in pairs:
        if dense.right != scheme.right:
            yield {
                "question": dense.question, "kind": "lost" if dense.right else "won", "expected": dense.expected, "dense": dense.said,
                "scheme": scheme.said,
            }


def as_csv(rows: Iterator[dict[str, Any]]) -> str:
    """Return rows as CSV with a header; "" without rows."""
    held, text = list(rows), io.StringIO()
    if held:
        writer = csv.DictWriter(text, list(held[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(held)
    return text.getvalue()


def summarised(item: Measured) -> dict[str, Any]:
    """Return one scheme's figures over all lengths, for JSON."""
    return {
        "scheme": item.scheme, "bits_per_byte": item.bits_per_byte, "kl": item.kl, "agreement": item.agreement.plain(),
        **{task: item.share(task).plain() for task in item.tasks}, "cache_bytes": item.cache_bytes, "dense_bytes": item.dense_bytes,
        "seconds": item.seconds, "graphs": item.graphs, "refusals": list(item.refusals), "telemetry": item.telemetry,
        "asked": item.asked,
    }


def measured_plain(item: Measured) -> dict[str, Any]:
    """Return one scheme's figures and records, for JSON."""
    return summarised(item) | {
        "texts": [plain(text) for text in item.texts], "held": [plain(held) for held in item.held],
        "layers": [plain(layer) for layer in item.layers], "answers": [plain(answer) for answer in item.answers],
        "adaptation": [plain(each) for each in item.adaptation],
    }


def _known(row: Any) -> Any:
    """Return a row of the file without the summaries that ``Results.plain`` adds to the records in it."""
    names = {field.name for field in dataclasses.fields(Measured)}
    return {name: value for name, value in row.items() if name in names} if isinstance(row, dict) else row
