"""``calibrate``: static scales of a model from batches of tokens, and the share of values that they clip."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import BadBatch, BadCalibration, BadScales, KvcompileError, NothingToLearn
from kvcompile.extensions.model_runs import frozen, moved
from kvcompile.extensions.static_scales.measure.magnitudes import Clipped, Magnitudes
from kvcompile.extensions.static_scales.measure.observing_graph import ObservingBackend, SlotIdentity
from kvcompile.extensions.static_scales.scales import ModelScales, ScaleExtent, Scales, SiteScales
from kvcompile.extensions.static_scales.scheme import Calibrated, static_of, with_scales
from kvcompile.passes.graph.dynamo import many_versions
from kvcompile.schemes.model_file import fingerprint
from kvcompile.types import Role

NAMES = ("int8", "fp8")
MOST_GRAPHS = 1024
"""Versions of one frame that are traced: each length of text has a graph of its own."""


@dataclass(frozen=True)
class SlotCalibration:
    """The result for one slot: its largest magnitude, its scales, and the shares of values that they clip.

    ``clipped``: the share in the calibration's own batches; ``clipped_validation``: the share in the validation batches, None without any.
    """

    path: str
    role: Role
    amax: float
    scales: Scales
    clipped: float
    clipped_validation: float | None


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the scheme, its slots in the order of the model, and the number of tokens seen."""

    scheme: Calibrated
    slots: tuple[SlotCalibration, ...]
    tokens: int


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of a calibration. ``percentile``: the percentage of values that a scale covers; ``margin``: a factor on its range."""

    kind: type[Calibrated]
    granularity: ScaleExtent
    percentile: float
    margin: float

    @staticmethod
    def of(scheme: str, granularity: str | ScaleExtent, percentile: float, margin: float) -> CalibrationOptions:
        """Return the options from the arguments of ``calibrate``. Raises BadCalibration for a value that is not allowed."""
        kind = static_of(scheme) if isinstance(scheme, str) else None
        if kind is None:
            raise BadCalibration(setting="scheme", expected=" or ".join(NAMES), found=scheme)
        try:
            extent = ScaleExtent(granularity)
        except ValueError as error:
            raise BadCalibration(setting="granularity", expected="tensor or head", found=granularity) from error
        for name, value, least, most in (("percentile", percentile, 50.0, 100.0), ("margin", margin, 0.1, 16.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                raise BadCalibration(setting=name, expected=f"a number from {least:g} to {most:g}", found=value)
        return CalibrationOptions(kind, extent, float(percentile), float(margin))


def calibrate(
    model: torch.nn.Module, batches: Iterable[Any], scheme: str = "int8", *, granularity: str | ScaleExtent = ScaleExtent.TENSOR,
    percentile: float = 100.0, margin: float = 1.0, validation: Iterable[Any] = (), report: Callable[[Calibration], None] | None = None,
) -> Calibrated:
    """Return ``scheme`` (int8 or fp8) with static scales that are measured on a causal model here, ready to serve.

    ``batches``: token ids [B, S], or mappings of the model's arguments; tokens that an ``attention_mask`` [B, S] masks do not count.
    ``granularity``: one scale for the keys and one for the values of each layer (tensor), or one per kv head (head). A scale covers the
    largest magnitude, or with ``percentile`` that percentage of the values, times ``margin``; values beyond are clipped. ``report`` is
    called with the findings and the clipped shares of ``batches``, which then run twice, and of ``validation``.

    Raises BadCalibration for an option that is not allowed, NothingToLearn for a model without attentions to observe, BadBatch for a batch
    that is not token ids with a fitting mask or in which not all attentions can be observed, and BadScales for keys or values that are not
    finite or all zero.
    """
    options = CalibrationOptions.of(scheme, granularity, percentile, margin)
    held = list(batches)
    with frozen(model), torch.no_grad():
        run = _CalibrationRun(model)
        seen = run.magnitudes(held, options.percentile < 100)
        scales = {slot: _scales(slot, found, options) for slot, found in seen.items()}
        made = _scheme(model, scales, options)
        if report is not None:
            own, others = run.clipped(held, scales, options), run.clipped(list(validation), scales, options)
            report(Calibration(made, tuple(
                SlotCalibration(
                    slot.path, slot.role, float(seen[slot].amax.amax()), scales[slot], own[slot].share,
                    others[slot].share if others[slot].values else None,
                ) for slot in seen
            ), run.tokens))
    return made


def _scales(slot: SlotIdentity, found: Magnitudes, options: CalibrationOptions) -> Scales:
    """Return the scales of one slot. Raises BadScales if its magnitudes are not finite or all zero."""
    where = f"the {slot.role.value}s of {slot.path or 'the model'}"
    if not found.finite:
        raise BadScales(expected=f"finite numbers in {where}", found="NaN or Inf", todo="calibrate in another dtype, or on other text")
    if not bool(found.amax.any()):
        raise BadScales(expected=f"tokens that count, other than zeros, in {where}", found="none", todo="pass text that is not all masked")
    return found.scales(options.granularity, options.percentile, options.margin, options.kind.qmax)


def _scheme(model: torch.nn.Module, scales: Mapping[SlotIdentity, Scales], options: CalibrationOptions) -> Calibrated:
    """Return the scheme of the options' kind with ``scales``, grouped by module path, and the model's fingerprint."""
    paths = dict.fromkeys(slot.path for slot in scales)
    sites = {path: SiteScales(*(scales[SlotIdentity(path, role)] for role in Role)) for path in paths}
    return with_scales(options.kind, ModelScales(sites, fingerprint(model)))


class _CalibrationRun:
    """A model run over batches while its slots are observed; ``tokens``: the number that counted in the last measuring pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.tokens = model, 0
        self.names = inspect.signature(model.forward).parameters
        self.device = next(model.parameters()).device
        self.keep: torch.Tensor | None = None
        self.seen: set[SlotIdentity] = set()
        self.known: set[SlotIdentity] = set()
        self.look: Callable[[SlotIdentity, torch.Tensor], None] = lambda slot, tokens: None
        self.backend = ObservingBackend(self._observe)
        # One graph for each length of text, none dynamic: a graph is only used for this pass.
        self.compiled = torch.compile(model, backend=self.backend, dynamic=False)

    def magnitudes(self, batches: list[Any], counted: bool) -> dict[SlotIdentity, Magnitudes]:
        """Return the magnitudes of every slot over all batches, with histograms if ``counted``. Raises NothingToLearn without any."""
        found: dict[SlotIdentity, Magnitudes] = {}
        self._pass(batches, lambda slot, tokens: found.setdefault(slot, Magnitudes(counted)).add(tokens))
        if found:
            return found
        refusals = self.backend.refusals
        why = f" (the first of {len(refusals)} reasons: {refusals[0]})" if refusals else ""
        raise NothingToLearn(why=why, todo="pass batches of a causal model, with calls that torch.compile can capture")

    def clipped(
        self, batches: list[Any], scales: Mapping[SlotIdentity, Scales], options: CalibrationOptions
    ) -> dict[SlotIdentity, Clipped]:
        """Return, for every slot of ``scales``, how many of its values in ``batches`` are beyond the range of its scales.

        Runs the model over ``batches``. Raises BadBatch.
        """
        found = {slot: Clipped(held.values * options.kind.qmax) for slot, held in scales.items()}
        tokens = self.tokens
        self._pass(batches, lambda slot, seen: found[slot].add(seen) if slot in found else None)
        self.tokens = tokens
        return found

    def _pass(self, batches: list[Any], look: Callable[[SlotIdentity, torch.Tensor], None]) -> None:
        self.look, self.tokens = look, 0
        for batch in batches:
            given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            given = {name: value for name, value in moved(given, self.device).items() if name != "loss_mask"}
            ids = given.get("input_ids")
            if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
                found = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(batch).__name__
                raise BadBatch(expected="token ids [B, S]", found=found, todo="pass tensors, or mappings with input_ids")
            mask = given.get("attention_mask")
            self.keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(torch.bool)
            if self.keep.shape != ids.shape:
                raise BadBatch(expected=f"an attention_mask of {tuple(ids.shape)}", found=tuple(self.keep.shape), todo="one a token")
            self.tokens += int(self.keep.sum())
            self._call(given, ids)

    def _call(self, given: Mapping[str, Any], ids: torch.Tensor) -> None:
        extra = {"use_cache": False} if "use_cache" in self.names else {}
        self.seen = set()
        try:
            with many_versions(MOST_GRAPHS):
                if "input_ids" in self.names:
                    self.compiled(**given, **extra)
                else:
                    self.compiled(ids, **{name: value for name, value in given.items() if name != "input_ids"}, **extra)
        except Exception as error:
            # Dynamo wraps what its backend raises.
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, KvcompileError):
                raise inner from error
            raise
        self.known = self.known or self.seen
        if self.seen != self.known:
            # Beyond its limit of versions Dynamo runs a model uncompiled, and nothing is observed.
            raise BadBatch(
                expected=f"a batch that shows all {len(self.known)} keys and values of the others", found=f"{len(self.seen)} of them",
                todo="pass batches of fewer lengths, through the layers that every batch goes through",
            )

    def _observe(self, slot: SlotIdentity, tokens_BKSD: torch.Tensor) -> None:
        """Pass the tokens of one slot that are not padding to the observer. Raises BadBatch unless there is one per token of the batch."""
        assert self.keep is not None
        if (tokens_BKSD.shape[0], tokens_BKSD.shape[2]) != tuple(self.keep.shape):
            raise BadBatch(
                expected=f"keys and values of {tuple(self.keep.shape)} tokens at {slot.path}", found=tuple(tokens_BKSD.shape),
                todo="pass text alone, one position a token",
            )
        self.seen.add(slot)
        self.look(slot, tokens_BKSD.transpose(1, 2)[self.keep])
