"""The trainer: one optimizer step from pieces of a batch, validation, and the current tables; no files, no printing.

Adam and the window are in units where a group spans 0 to 1; parameters are in units of scales, where it spans c = 2^bits - 1. Except for
its epsilon, Adam's update does not depend on the unit of a gradient, so rate times c and epsilon over c give the paper's optimizer
exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kvcompile.errors import BadBatch, KvcompileError, NothingToLearn
from kvcompile.extensions.beyond.learning import processes
from kvcompile.extensions.beyond.learning.loss import Loss
from kvcompile.extensions.beyond.learning.parameters import Parameters
from kvcompile.extensions.beyond.learning.projection import ordered
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig, rectified
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.training_graph import TrainingBackend
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.model_runs import moved
from kvcompile.passes.graph.dynamo import many_versions

MOST_GRAPHS = 1024
"""Versions of one frame that are compiled: each length of text, and validation, has a graph of its own."""

EPSILON = 1e-8
"""Adam's epsilon, in units where a group spans 0 to 1."""


class Trainer:
    """A model with quantizers in its graph, their parameters and Adam's state; ``steps`` counts optimizer steps."""

    def __init__(self, model: torch.nn.Module, scheme: Beyond, settings: LearnSettings, loss: Loss) -> None:
        self.model, self.scheme, self.settings, self.loss = model, scheme, settings, loss
        self.span = float(2**scheme.bits - 1)
        self.parameters = Parameters(scheme)
        self.rule = QuantizerConfig(scheme.bits, scheme.scale_dtype, settings.window * self.span)
        self.backend = TrainingBackend(self.parameters, self.rule, settings.inner, settings.memory_budget)
        self.run: Callable[..., Any] = torch.compile(model, backend=self.backend, dynamic=False)
        self.device = next(model.parameters()).device
        self.steps = 0
        self.adam: torch.optim.Adam | None = None

    # --- parameters ------------------------------------------------------------------------------

    def meet(self, batch: Any) -> None:
        """Run ``batch`` to find the model's attentions; make their parameters and Adam's state.

        Raises NothingToLearn if there are no attentions, and any error of kvcompile that Dynamo has wrapped.
        """
        try:
            with torch.no_grad(), many_versions(MOST_GRAPHS):
                self.loss(self.run, moved(batch, self.device))
        except Exception as error:
            # Dynamo wraps what its backend raises.
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, KvcompileError):
                raise inner from error
            raise
        if not self.parameters.slots:
            first = self.backend.refusals[0] if self.backend.refusals else None
            raise NothingToLearn(
                why=f" (the first of {len(self.backend.refusals)} reasons: {first})" if first is not None else "",
                todo="pass a causal model, with calls that torch.compile can capture",
            )
        learned = self.learned()
        self.adam = torch.optim.Adam(learned, lr=self.settings.rate * self.span, eps=EPSILON / self.span) if learned else None

    def learned(self) -> list[torch.Tensor]:
        """Return the tensors that Adam updates."""
        slots, settings = self.parameters.all(), self.settings
        levels = [slot.levels for slot in slots] if settings.levels else []
        return levels + ([slot.thresholds for slot in slots] if settings.thresholds else [])

    def tables(self, fingerprint: str) -> Beyond:
        """Return the scheme with the current tables, trained; ``fingerprint``: the model's."""
        made = self.parameters.tables(fingerprint)
        return dataclasses.replace(self.scheme, trained=True, tables=made)

    # --- learning --------------------------------------------------------------------------------

    def learn(self, pieces: Sequence[Any]) -> float:
        """Take one optimizer step on a batch in pieces; return its loss in nats per token.

        Returns NaN, without a step, if gradients are not finite. Raises BadBatch for a batch without tokens that count.
        """
        if not self.parameters.slots:
            self.meet(pieces[0])
        slots = self.parameters.all()
        for slot in slots:
            for operand in slot.operands:
                operand.grad = None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        for piece in pieces:
            part, tokens = self._loss_of(piece)
            if torch.is_tensor(part) and part.requires_grad:
                part.backward()
            total += part.detach()
            count += tokens
        grads = [operand.grad for slot in slots for operand in (slot.levels, slot.left, slot.right) if operand.grad is not None]
        processes.add_up([*grads, total, count])
        if not float(count):
            raise BadBatch(expected="tokens that count in every batch", found="a batch whose loss_mask is all False", todo="drop it")
        self._step(float(count))
        return float(total / count) if self._finite else math.nan

    def _loss_of(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a batch, (sum, count), over quantized keys and values. Raises BadBatch if any were not quantized."""
        self.backend.ran.clear()
        with many_versions(MOST_GRAPHS):
            found = self.loss(self.run, moved(batch, self.device))
        missed = len(self.parameters.slots) - len(self.backend.ran)
        if missed:
            # Beyond its limit of versions Dynamo runs the unchanged model, whose loss does not depend on the tables.
            raise BadBatch(
                expected=f"the keys and values of all {len(self.parameters.slots)} slots quantized", found=f"{missed} that were not",
                todo="pass batches of fewer lengths, through the layers that every batch goes through",
            )
        return found

    def _step(self, count: float) -> None:
        """Take Adam's step from gradients that were summed over ``count`` tokens, then project the thresholds (``ordered``).

        Takes no step if gradients are not finite.
        """
        slots, settings = self.parameters.all(), self.settings
        for slot in slots:
            if slot.left.grad is not None and slot.right.grad is not None:
                slot.thresholds.grad = rectified(slot.left.grad, slot.right.grad, settings.half_wave) / (count * self.span)
            if slot.levels.grad is not None:
                slot.levels.grad = slot.levels.grad / count
        self._finite = all(bool(item.grad.isfinite().all()) for item in self.learned() if item.grad is not None)
        if not self._finite:
            return
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"] = settings.rate_at(self.steps) * self.span
            self.adam.step()
        self.steps += 1
        if settings.thresholds:
            with torch.no_grad():
                for slot in slots:
                    slot.thresholds.copy_(ordered(slot.thresholds, self.span, settings.margin * self.span))

    _finite = True

    def validate(self, batches: Iterable[Any]) -> float:
        """Return the loss over batches, in nats per token. Raises BadBatch if no token counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch in batches:
                part, tokens = self._loss_of(batch)
                total += part
                count += tokens
        processes.add_up([total, count])
        if not float(count):
            raise BadBatch(expected="tokens to validate on", found="none that count", todo="pass validation batches, or none")
        return float(total / count)
