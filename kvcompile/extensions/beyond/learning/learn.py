"""``learn``: tables of a scheme for one model from batches of its tokens; the loop around ``Trainer`` that stops, saves and reports."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import BadBatch, BadLearnSetting, BadTables
from kvcompile.extensions.beyond.learning import processes, serving
from kvcompile.extensions.beyond.learning.display import Display
from kvcompile.extensions.beyond.learning.loss import Loss, NextToken, parts
from kvcompile.extensions.beyond.learning.run_folder import Progress, RunFolder
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.trainer import Trainer
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.model_runs import frozen, moved
from kvcompile.schemes.model_file import fingerprint

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 10


@dataclass(frozen=True)
class Learned:
    """The result of learning: the scheme with the best tables, losses in nats per token, the steps taken, and the reason for the stop."""

    scheme: Beyond
    initial: float | None
    best: float | None
    best_step: int
    steps: int
    stopped: str
    losses: tuple[tuple[int, float], ...]
    validations: tuple[tuple[int, float], ...]


def sequences(batch: Any) -> int:
    """Return the number of sequences of a batch; 1 for a batch that ``NextToken`` does not accept."""
    try:
        return int(parts(batch)[0].shape[0])
    except BadBatch:
        return 1


def grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of consecutive batches, one list for each optimizer step, with at least ``size`` sequences in a list.

    The last list may have fewer.
    """
    pieces: list[Any] = []
    held = 0
    for batch in batches:
        pieces.append(batch)
        held += sequences(batch)
        if held >= size:
            yield pieces
            pieces, held = [], 0
    if pieces:
        yield pieces


def learn(
    model: torch.nn.Module, batches: Iterable[Any], scheme: Beyond | None = None, *, validation: Sequence[Any] = (),
    settings: LearnSettings | None = None, loss: Loss | None = None, run: str | Path | None = None, resume: bool = False,
    quiet: bool = False, report: Callable[[Learned], None] | None = None,
) -> Beyond:
    """Learn the tables of ``scheme`` for a causal model, its weights frozen; returns the scheme with the best ones, ready to serve.

    ``batches``: token ids [B, S], or mappings with ``input_ids`` and optionally ``loss_mask``; they are used once, and batches of fewer
    sequences than ``settings.batch`` are pieces of one step. ``validation``: held-out batches of the same kind; the tables of its lowest
    loss are returned, or the last ones without validation. ``loss``: (model, batch) -> (sum, count), next-token loss by default. ``run``: a
    folder for log, checkpoints and pictures; ``resume``: continue from its checkpoint, with the same batches. Ctrl-C ends learning and
    keeps the best. ``quiet``: show no progress. ``report`` is called with the result. Under ``torchrun`` every process passes batches of
    its own.

    Raises BadTables for a scheme that has tables, BadLearnSetting for ``resume`` without ``run`` and for no batches, BadBatch for a batch
    without tokens that count, BadRun for a folder that does not fit, and NothingToLearn for a model without attentions to rewrite.
    """
    scheme, settings = scheme or Beyond(), settings or LearnSettings()
    if scheme.trained:
        raise BadTables(expected="a scheme without tables", found=scheme.display_name(), todo="pass Beyond(bits=..., group=...)")
    if resume and run is None:
        raise BadLearnSetting(setting="run", expected="the folder to resume from", found=run)
    with frozen(model):
        made = _Loop(model, scheme, settings, loss or NextToken(model), run, resume, quiet).learn(batches, validation)
    if report is not None:
        report(made)
    return made.scheme


class _Loop:
    """One run: its trainer, folder, progress, and the best tables so far."""

    def __init__(
        self, model: torch.nn.Module, scheme: Beyond, settings: LearnSettings, loss: Loss, run: str | Path | None, resume: bool, quiet: bool
    ) -> None:
        self.settings, self.resume = settings, resume
        self.fingerprint = fingerprint(model)
        self.trainer = Trainer(model, scheme, settings, loss)
        config = {"scheme": scheme.spec(), "settings": settings.plain(), "fingerprint": self.fingerprint, "processes": processes.count()}
        self.folder = RunFolder(Path(run), config, resume, writes=processes.rank() == 0) if run is not None else None
        self.display = Display(settings.steps, scheme, quiet or processes.rank() != 0)
        self.progress = Progress()
        self.best: Beyond | None = None

    def learn(self, batches: Iterable[Any], validation: Sequence[Any]) -> Learned:
        """Train the tables on ``batches`` until they are used up or a rule stops the training; return the tables and losses as Learned.

        Raises BadLearnSetting for no batches.
        """
        stopped = "all batches were used"
        pieces = iter(batches)
        first = next(pieces, None)
        if first is None:
            raise BadLearnSetting(setting="batches", expected="at least one batch", found="none")
        if self.settings.compared:
            serving.compare(self.trainer.model, first, self.trainer.scheme, self.trainer.rule)
        self.trainer.meet(first)
        if self.resume:
            self._resumed()
        pieces = itertools.islice(itertools.chain([first], pieces), self.progress.pieces, None)
        with self.display:
            try:
                if not self.progress.validations:
                    self._validate(validation)
                for group in grouped(pieces, max(1, self.settings.batch // processes.count())):
                    reason = self._one(group, validation)
                    if reason is not None:
                        stopped = reason
                        break
            except KeyboardInterrupt:
                stopped = "interrupted"
        return self._ended(stopped, validation)

    def _one(self, group: list[Any], validation: Sequence[Any]) -> str | None:
        """Take one optimizer step on a group of pieces, then validate and write a checkpoint if due; return the reason to stop, or None."""
        if self.trainer.steps >= self.settings.steps:
            return "all steps were taken"
        found = self.trainer.learn(group)
        step = self.trainer.steps
        if not math.isfinite(found):
            return "gradients were not finite"
        self.progress.pieces += len(group)
        self.progress.losses.append((step, found))
        self._log(step=step, loss=found, rate=self.settings.rate_at(step - 1))
        self.display.step(step, found, self.progress.best)
        if step % self.settings.validate_every == 0:
            self._validate(validation)
        if step % CHECKPOINT_EVERY == 0:
            self._save()
        if self.progress.rises >= self.settings.patience:
            return f"validation rose {self.settings.patience} times in a row"
        return "all steps were taken" if step >= self.settings.steps else None

    def _validate(self, batches: Sequence[Any]) -> None:
        if len(batches) == 0:
            return
        step, progress = self.trainer.steps, self.progress
        found = self.trainer.validate(batches)
        rose = bool(progress.validations) and found > progress.validations[-1][1]
        progress.rises = progress.rises + 1 if rose else 0
        progress.validations.append((step, found))
        self._log(step=step, validation=found)
        if progress.best is None or found < progress.best:
            progress.best, progress.best_step = found, step
            self.best = self.trainer.tables(self.fingerprint)
            if self.folder is not None:
                self.folder.keep_best(self.best)

    def _ended(self, stopped: str, validation: Sequence[Any]) -> Learned:
        progress = self.progress
        # Without validation the last tables are returned.
        if self.best is None or len(validation) == 0:
            self.best, progress.best_step = self.trainer.tables(self.fingerprint), self.trainer.steps
        self._log(stopped=stopped, best=progress.best, best_step=progress.best_step)
        if self.folder is not None:
            self.folder.keep_best(self.best)
            self.folder.draw(progress, self.best)
        initial = progress.validations[0][1] if progress.validations else None
        return Learned(
            self.best, initial, progress.best, progress.best_step, self.trainer.steps, stopped, tuple(progress.losses),
            tuple(progress.validations),
        )

    def _log(self, **line: Any) -> None:
        if self.folder is not None:
            self.folder.log(**line)

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save(self.trainer, self.progress, self.best or self.trainer.tables(self.fingerprint))

    def _resumed(self) -> None:
        """Load the run folder's checkpoint into this run: the trainer's state, the progress and the best tables so far.

        Raises BadRun for a damaged checkpoint, and BadTables if the best tables cannot be read.
        """
        from kvcompile.extensions.beyond.storage import read_tables

        assert self.folder is not None
        self.progress = self.folder.load(self.trainer)
        if self.progress.best is not None:
            self.best = read_tables(self.folder.folder / "best.safetensors")


def native_loss(model: torch.nn.Module, batches: Iterable[Any], loss: Loss | None = None) -> float:
    """Return the loss of the model in full precision, without quantizers, in nats per token.

    ``loss``: (model, batch) -> (sum, count); None for next-token loss, which raises BadBatch for a batch that it does not accept. Raises
    ZeroDivisionError if no token counts.
    """
    measure, device = loss or NextToken(model), next(model.parameters()).device
    total, count = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            part, tokens = measure(model, moved(batch, device))
            total, count = total + float(part), count + float(tokens)
    return total / count
