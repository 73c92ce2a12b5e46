"""Bench: a subject with its texts, questions and reference, on which schemes are measured one after another.

Every scheme runs as in use: prompts are prefilled through the compiled model into an empty cache; then single tokens, beginning with the
prompt's last one, are decoded over it. The reference is the uncompiled model, which answers through a cache of its own and predicts without
one. Caches for all lengths of prompts have one capacity, so a scheme compiles one graph for each length's prompt and one for all steps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.backend import Backend, backend
from kvcompile.errors import BadEvaluation
from kvcompile.passes.graph.dynamo import many_versions
from kvcompile.report import short_text
from kvcompile.settings import Inner
from kvcompile.tools.evaluation.adaptation import Adaptation, Watch
from kvcompile.tools.evaluation.decoding import answers, forced, last_only
from kvcompile.tools.evaluation.fidelity import attention_errors
from kvcompile.tools.evaluation.measures import Answer, Held, LayerError, Measured, Text
from kvcompile.tools.evaluation.subject import Question, Subject
from kvcompile.tools.evaluation.tasks import KEYED, RULER, TASKS

DENSE = "uncompressed"
"""Label of the reference."""
MOST_GRAPHS = 64
"""Versions of one frame that Dynamo may compile: one per length, and one for steps."""


@dataclass(frozen=True)
class Effort:
    """The extent of an evaluation: lengths, numbers of texts and questions, tasks.

    ``lengths``: lengths of prompts, in the subject's units. ``tail``: tokens decoded after each text. ``batch``: number of texts, and of
    questions that run at a time. ``questions``: number of questions per task and length. ``keys``: lines whose keys share one of their two
    words, for tasks that have them. ``depths``: depths of the asked statements, used in turn; drawn at random if empty. ``attention``:
    whether to measure the outputs of attention modules too.

    Raises BadEvaluation for a task that is not known and for a depth outside of 0 to 1.
    """

    lengths: tuple[int, ...] = (2000,)
    tail: int = 128
    questions: int = 96
    keys: int = 16
    batch: int = 8
    inner: str = "inductor"
    tasks: tuple[str, ...] = ()
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    attention: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        Inner.of(self.inner)
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise BadEvaluation(setting="--tasks", expected=f"names among {', '.join(TASKS)}", found=unknown[0], todo="correct the name")
        outside = [depth for depth in self.depths if not 0 <= depth <= 1]
        if outside:
            raise BadEvaluation(setting="--depths", expected="shares between 0 and 1", found=outside[0], todo="pass 0.5 for the middle")


QUICK = Effort(lengths=(600,), tail=32, questions=16, inner="eager", attention=False)


class Bench:
    """A subject with its texts and questions, and the reference that schemes are compared with: logits, computed when a Bench is made.

    ``report``: called with messages. Raises BadEvaluation for lengths that exceed the model's positions.
    """

    def __init__(self, subject: Subject, effort: Effort, report: Callable[[str], None] = lambda what: None) -> None:
        self.subject, self.effort, self.report = subject, effort, report
        names = effort.tasks or subject.trained or RULER
        depths = effort.depths or (None,)
        self.questions: dict[int, list[Question]] = {
            length: [
                item for task in names
                for item in subject.questions(task, effort.questions, length, depths, effort.seed, **_options(task, effort))
            ] for length in effort.lengths
        }
        asked = max((item.answer_tokens for items in self.questions.values() for item in items), default=0)
        self.capacity = len(subject.start) + max(effort.lengths) + max(effort.tail, asked)
        if subject.positions is not None and self.capacity > subject.positions:
            raise BadEvaluation(
                setting="--lengths", expected=f"prompts that with {self.capacity - max(effort.lengths)} tokens more are within "
                f"the {subject.positions:,} positions of {subject.name}", found=max(effort.lengths), todo="pass smaller lengths",
            )
        self.ids = {length: subject.texts(length, effort.tail, effort.batch) for length in effort.lengths}
        self.options = last_only(subject.model)
        self.logits = {length: self._plain(length) for length in effort.lengths}

    @torch.no_grad()
    def _plain(self, length: int) -> torch.Tensor:
        """Return the uncompressed model's logits [B, tail, V] of the tail, computed without a cache, one row at a time."""
        keep = {"logits_to_keep": self.effort.tail} if self.options else {}
        calls = (self.subject.model(input_ids=row[None, :-1], use_cache=False, **keep) for row in self.ids[length])
        return torch.cat([call.logits[:, -self.effort.tail :] for call in calls])

    def reference(self) -> Measured:
        """Return the measurements of the uncompressed model with an uncompressed cache: the losses of its texts, and its answers."""
        started = time.perf_counter()
        texts = tuple(self._text(length, self.logits[length].unbind(1)) for length in self.effort.lengths)
        said = tuple(item for length in self.effort.lengths for item in self._answers(self.subject.model, length, DENSE))
        return Measured(DENSE, texts, answers=said, seconds=time.perf_counter() - started)

    def measure(self, scheme: object, label: str | None = None) -> Measured:
        """Return the measurements of the model under one scheme: losses and KL of texts, answers, bytes. Resets the compiler.

        ``label`` None: the scheme as text. Raises a SchemeError for a text that names no scheme.
        """
        label, started = label or str(scheme), time.perf_counter()
        # Code compiled for an earlier scheme would count toward Dynamo's limit of versions.
        torch.compiler.reset()
        owner = backend(scheme, inner=self.effort.inner)
        with many_versions(MOST_GRAPHS):
            compiled = torch.compile(self.subject.model, backend=owner, dynamic=False)
            decoded = [self._decoded(compiled, owner, length, label) for length in self.effort.lengths]
            texts, held, seen = zip(*decoded, strict=True)
            telemetry = owner.telemetry()
            said = tuple(item for length in self.effort.lengths for item in self._answers(compiled, length, label))
            asked = owner.telemetry().since(telemetry)
            report = owner.report()
            paths = [site.path for graph in report.graphs for site in graph.sites]
            layers = self._layers(scheme, paths, label) if self.effort.attention else ()
        return Measured(
            label, texts, layers, said, held, time.perf_counter() - started, len(report.graphs),
            tuple(dict.fromkeys(item.reason for item in report.refusals)), telemetry.plain(), asked.plain(),
            tuple(each for each in seen if each is not None),
        )

    def _decoded(self, model: Any, owner: Backend, length: int, label: str) -> tuple[Text, Held, Adaptation | None]:
        """Decode the texts of ``length`` units; return (losses and KL, bytes of the cache afterwards, an adaptive scheme's widths)."""
        self.report(f"{label}: texts of {length:,} {self.subject.unit}")
        # An unreferenced cache that the collector has not freed would be counted too.
        gc.collect()
        cache = self.subject.cache(self.capacity)
        prompt = len(self.subject.start) + length
        watch = Watch(owner, length, prompt, self.effort.tail)
        text = self._text(length, watch.over(forced(model, self.ids[length], prompt, cache, self.options)))
        live = owner.report()
        return text, Held(length, live.allocated, live.dense), watch.adaptation()

    def _text(self, length: int, steps: Any) -> Text:
        """Return bits per byte, KL and agreement over the last tokens of the texts of ``length``; ``steps`` yields their logits [B, V]."""
        ids, prompt, tail = self.ids[length], len(self.subject.start) + length, self.effort.tail
        nats = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        kl, same = torch.zeros_like(nats), torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        for at, logits in enumerate(steps):
            # In float64: rounding of float32 probabilities is as large as the damage of eight bits.
            ours, theirs = logits.double().log_softmax(-1), self.logits[length][:, at].double().log_softmax(-1)
            nats -= ours.gather(-1, ids[:, prompt + at, None])[:, 0]
            kl += torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
            same += ours.argmax(-1) == theirs.argmax(-1)
        counts = [self.subject.count_bytes(row, tail) for row in ids.tolist()]
        bits = [value / math.log(2) / count for value, count in zip(nats.tolist(), counts, strict=True)]
        kinds = self.subject.kinds(length, tail, len(ids)) if self.subject.spans else ()
        return Text(length, tuple(bits), tuple((kl / tail).tolist()), tuple(same.tolist()), tail, kinds)

    def _answers(self, model: Any, length: int, label: str) -> list[Answer]:
        questions, done = self.questions[length], 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            self.report(f"{label}: {done} of {len(questions)} questions of {length:,} {self.subject.unit}")

        found = []
        for item, said in zip(questions, answers(
            model, self.subject, questions, self.effort.batch, self.capacity, self.options, report,
        ), strict=True):
            right, score = self.subject.rule.judge(item.task, item.expected, said)
            found.append(Answer(item.name, item.task, item.length, item.depth, item.expected, said, right, score))
        return found

    def _layers(self, scheme: object, paths: Sequence[str], label: str) -> tuple[LayerError, ...]:
        self.report(f"{label}: outputs of attention")
        return attention_errors(self.subject, scheme, paths, self.ids, self.capacity)


def _options(task: str, effort: Effort) -> dict[str, int]:
    """Return the options of a task's plan that ``effort`` sets to other values than the plan's defaults; empty if there are none."""
    return {"keys": effort.keys} if task in KEYED and effort.keys != Effort.keys else {}


def labels(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (scheme as given, label) of each name. Raises a SchemeError for a name of no scheme."""
    return [(name, short_text(name)) for name in names]
