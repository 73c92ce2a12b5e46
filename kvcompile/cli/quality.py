"""Quality of schemes, measured on tinylm through the compiled cache: what compression does to a model's answers.

Every scheme runs the same way as in use: the prompt is prefilled into an empty cache, then single tokens are
decoded from what the cache holds. The reference is the model as it is, uncompiled and without a cache. All
shapes are the same throughout, so each scheme compiles two graphs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from kvcompile.backend import backend
from kvcompile.cli.targets import Options, resolve, static_cache
from kvcompile.errors import TargetError
from kvcompile.lowering.certified.telemetry import COLUMNS, Telemetry
from kvcompile.report import short_scheme, size_text
from kvcompile.schemes import parse

TINYLM = Path(__file__).resolve().parents[2] / "examples" / "tinylm"
TASKS = ("needle", "multikey", "variable")
"""One line among filler, one of many lines, a chain of assignments to follow."""
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Effort:
    """How much is measured: prompt bytes, decoded bytes of text, questions a task, batch rows, the inner compiler."""

    context: int = 2000
    tail: int = 128
    questions: int = 96
    batch: int = 8
    inner: str = "inductor"


QUICK = Effort(context=600, tail=32, questions=16, inner="eager")


@dataclass(frozen=True)
class Share:
    """Hits out of trials, with Wilson's 95% interval."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        """The share."""
        return self.hits / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end."""
        n, p, z = self.trials, self.value, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"hits": self.hits, "trials": self.trials, "low": self.interval[0], "high": self.interval[1]}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%}\n[dim]{low:.0%} to {high:.0%}[/]"


@dataclass(frozen=True)
class Quality:
    """The quality of one scheme; KL is in nats a token, from the reference to the scheme."""

    scheme: str
    bits_per_byte: float
    agreement: Share
    kl: float
    needle: Share
    multikey: Share
    variable: Share
    cache_bytes: int
    dense_bytes: int
    seconds: float
    telemetry: Telemetry
    """What certified attention did while the text was decoded; no head-steps for other schemes."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        made = {name: getattr(self, name).plain() for name in ("agreement", *TASKS)} | {"telemetry": self.telemetry.values}
        return {**{name: value for name, value in vars(self).items() if name not in made}, **made}


class Bench:
    """tinylm with its text and questions, and the reference that schemes are held against."""

    def __init__(self, effort: Effort, folder: Path = TINYLM, device: str = "cpu", seed: int = 0) -> None:
        if not (folder / "evaluate.py").is_file():
            raise TargetError(found=str(folder), why="it is not tinylm's folder; eval runs from a clone of the repository")
        if str(folder.parent) not in sys.path:
            sys.path.insert(0, str(folder.parent))
        codec, corpus, evaluate, tasks = (import_module(f"tinylm.{name}") for name in ("codec", "corpus", "evaluate", "tasks"))
        self.effort, self.evaluate = effort, evaluate
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.dtype = str(dtype).removeprefix("torch.")
        self.model = resolve(str(folder), Options(dtype=dtype, device=device)).model
        text = corpus.heldout_text()
        self.questions = {task: tasks.examples(task, effort.questions, effort.context, text, seed=seed) for task in TASKS}
        stride = (len(text) - effort.context - effort.tail) // effort.batch
        rows = [codec.encode(text[row * stride :][: effort.context + effort.tail]) for row in range(effort.batch)]
        # One start token and ``context`` bytes are prefilled, as with the questions.
        self.ids = torch.tensor(rows, device=device)
        with torch.no_grad():
            whole = self.model(input_ids=self.ids[:, :-1], use_cache=False).logits
        self.reference = whole[:, effort.context :].float().log_softmax(-1)

    def cache(self) -> Any:
        """An empty cache with room for every prompt and what follows it."""
        return static_cache(self.model, self.effort.context + 1 + max(self.effort.tail, ANSWER_TOKENS))

    def reference_bits(self) -> float:
        """Bits per byte of the reference on the same text."""
        return self._bits(self.reference)

    def _bits(self, log_probabilities: torch.Tensor) -> float:
        targets = self.ids[:, self.effort.context + 1 :, None]
        return -float(log_probabilities.gather(-1, targets).mean()) / math.log(2)

    def measure(self, scheme: object, label: str | None = None) -> Quality:
        """The figures of one scheme."""
        started = time.perf_counter()
        # Code compiled for another scheme would count toward Dynamo's limit of versions.
        torch.compiler.reset()
        owner = backend(scheme, inner=self.effort.inner)
        compiled = torch.compile(self.model, backend=owner)
        cache = self.cache()
        found = self._decode(compiled, cache)
        live, telemetry = owner.report(), owner.telemetry()
        same = found.argmax(-1) == self.reference.argmax(-1)
        kl = torch.nn.functional.kl_div(found, self.reference, log_target=True, reduction="sum") / same.numel()
        del cache
        shares = {task: self._answers(compiled, task) for task in self.questions}
        return Quality(
            label or str(scheme), self._bits(found), Share(int(same.sum()), same.numel()), float(kl), **shares,
            cache_bytes=live.allocated, dense_bytes=live.dense, seconds=time.perf_counter() - started, telemetry=telemetry,
        )

    def _decode(self, model: Callable[..., Any], cache: Any) -> torch.Tensor:
        """Log-probabilities of the text's tail, each byte decoded through the cache after the true ones before it."""
        prefill, end = self.effort.context + 1, self.ids.shape[1]
        steps = []
        with torch.no_grad():
            for start, stop in [(0, prefill), *((at, at + 1) for at in range(prefill, end - 1))]:
                # Dynamo would compile again for the strides of a slice.
                logits = model(input_ids=self.ids[:, start:stop].contiguous(), past_key_values=cache, use_cache=True).logits
                steps.append(logits[:, -1:].float().log_softmax(-1))
        return torch.cat(steps, 1)

    def _answers(self, model: Callable[..., Any], task: str) -> Share:
        score = self.evaluate.answers_by_decoding(model, self.questions[task], self.cache, batch_size=self.effort.batch)
        return Share(score.hits, score.trials)


def labels(names: Sequence[str]) -> list[tuple[str, str]]:
    """(spelled scheme, label) of each name; raises a SchemeError before anything runs."""
    return [(name, short_scheme(parse(name))) for name in names]


def telemetry_table(rows: Sequence[Quality]) -> Table:
    """Bounds before and after the fallback, and how often each rung and cause was; after the source's tables 11, 12 and 15."""
    table = Table(
        title="certified attention while the texts were decoded", title_justify="left", title_style="bold",
        caption="bounds: mean and largest over head-steps; rungs and causes: share of head-steps; blocks: share of visible blocks of codes",
        caption_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
    )
    shown = [row for row in rows if row.telemetry["head_steps"]]
    table.add_column("")
    for row in shown:
        table.add_column(row.scheme, justify="right", overflow="fold")
    told = [row.telemetry for row in shown]
    table.add_row("head-steps", *(f"{each['head_steps']:,.0f}" for each in told))
    for name in COLUMNS:
        label = name.replace("_", " ")
        if name.startswith("sum_"):
            figure = name.removeprefix("sum_")
            bounds = (f"{each[name] / each['head_steps']:.2g}, {each['most_' + figure]:.2g}" for each in told)
            table.add_row(figure.replace("_", " "), *bounds)
        elif name.startswith(("rung_", "cause_")):
            table.add_row(label, *(f"{each[name] / each['head_steps']:.2%}" for each in told))
        elif name in {"keys", "values", "explored"}:
            table.add_row(f"{label} from originals", *(f"{each[name] / max(1.0, each['blocks']):.1%}" for each in told))
        elif name == "scratch" and any(each["scratch"] + each["fetched"] for each in told):
            table.add_row("keys found in the scratch", *(f"{each[name] / max(1.0, each[name] + each['fetched']):.1%}" for each in told))
    return table


def quality_table(rows: Sequence[Quality], effort: Effort, reference_bits: float, dtype: str) -> Table:
    """All schemes beside each other."""
    title = f"tinylm in {dtype}: prompts of {effort.context:,} bytes, then decoding from the cache ({effort.inner})"
    table = Table(
        title=title, title_justify="left", title_style="bold",
        caption=f"{effort.batch} texts, {effort.questions} questions a task; shares with their 95% intervals\n"
        f"the model as it is, uncompiled: {reference_bits:.3f} bits per byte",
        caption_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False,
    )
    table.add_column("scheme")
    for name in ("bits per byte", "same next byte", "KL (nats)", "needle", "multi-key", "variable", "cache", "of dense"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.scheme, f"{row.bits_per_byte:.3f}", str(row.agreement), f"{row.kl:.2g}", *(str(getattr(row, task)) for task in TASKS),
            size_text(row.cache_bytes), f"{row.cache_bytes / row.dense_bytes:.1%}" if row.dense_bytes else "",
        )
    return table
