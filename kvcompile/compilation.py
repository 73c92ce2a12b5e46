"""Compilation: takes one graph from Dynamo through the pipeline to the callable that Dynamo runs in its place.

capture -> match -> plan -> validate -> rewrite -> bind. A graph with no site, or in which every site is refused, is compiled unchanged;
compressed caches that it takes are decoded for it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvcompile.errors import KvcompileError, NotCompiled, SiteRefused, Unsupported, VerificationFailed
from kvcompile.lowering.graph_cache import call_key, identities
from kvcompile.passes.capture import floats
from kvcompile.passes.capture.attributes import lifted
from kvcompile.passes.capture.capture import Captured, capture
from kvcompile.passes.capture.nested import inlined
from kvcompile.passes.capture.retrace import unexposed
from kvcompile.passes.graph.dynamo import DisableTorchFunctionSubclass, compile_lock, detect_fake_mode
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.late_guards import Beliefs
from kvcompile.passes.graph.shapes import same
from kvcompile.passes.match.match import Matched, match
from kvcompile.passes.match.sites import Refusal, Stage
from kvcompile.passes.plan.plan import Plan, plan
from kvcompile.passes.plan.policy import Policy
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.records import GraphRecord
from kvcompile.report import GraphReport, Pass, SiteReport, graph_report
from kvcompile.runtime.call.binding import bind
from kvcompile.runtime.call.bound import BoundGraph
from kvcompile.runtime.call.dense_calls import DenseCalls, written_handles
from kvcompile.runtime.call.returned import is_returned, noting
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.handle.guards import accept_handles
from kvcompile.runtime.handle.tensor import over_tensors
from kvcompile.runtime.handle.views import DecodedView
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches
from kvcompile.settings import Settings, Validate
from kvcompile.trace_artifacts import trace_graph
from kvcompile.validation import SiteOutcome, Verdict, verdicts
from kvcompile.variants import Code, InnerCompiler, Variants, parameters

log = logging.getLogger(__name__)

BLIND = (
    "queries that see no token (left padding) return zeros here and other values in the uncompiled model, whose mask is a finite number; "
    "these results are unused as long as padding stays masked"
)


REFUSED = {
    SiteOutcome.DIFFERENT: (
        "the rewritten attention gave a different result on random inputs", "please report this module: the matcher misread it",
    ),
    SiteOutcome.UNKNOWN: (
        "it could not be run on random inputs to compare it with the rewritten attention",
        "please report this module; validate=\"where possible\" rewrites what could not be validated, at your own risk",
    ),
}
"""For each outcome that leaves a site unchanged: the reason in its refusal, and the advice."""


@dataclass(frozen=True)
class BackendState:
    """State that all graphs of one backend share.

    ``live``: states of live caches. ``growth``: how stores grow.
    ``compiled``: compiled code by fingerprint of the rewritten graph.
    ``bound``: bound graphs with their records, by key of Dynamo's graph.
    ``verdicts``: results of validations.
    ``reported``: warnings that were logged, each once; for a cache that stayed dense, by (kind, location), the reason.
    """

    live: LiveCaches
    growth: Growth
    compiled: MutableMapping[str, Code]
    bound: MutableMapping[str, tuple[BoundGraph, GraphRecord]]
    verdicts: dict[str, Verdict]
    reported: dict[object, str] = field(default_factory=dict)


class Compilation:
    """One graph, compiled once; ``record`` holds its stages and ``report`` its result."""

    def __init__(
        self, gm: fx.GraphModule, examples: list[Any], policy: Policy, settings: Settings, memory: BackendState, index: int,
        mode: str | None, options: dict[str, Any] | None,
    ) -> None:
        graph = lifted(inlined(gm))
        self.gm, self.attributes = graph.module, graph.tensors
        self.examples = [*examples, *graph.tensors]
        self.policy, self.settings, self.memory = policy, settings, memory
        self.report = GraphReport(index)
        self.record = GraphRecord(self.report)
        self.effects: Effects | None = None
        self.inner = InnerCompiler(settings, mode, options, self.report)

    def run(self) -> Code:
        """Return the callable that Dynamo runs in place of the graph.

        Raises TensorifyScalarRestartAnalysis if Dynamo must retrace with constants.
        """
        views = any(type(value) is DecodedView for value in self.examples)
        try:
            code = self._compiled()
            compiled = self._with_attributes(code if isinstance(code, BoundGraph) else noting(code))
        finally:
            # The compiled graph must not keep the example arguments alive: caches are among them.
            self.examples = []
        return over_tensors(compiled) if views else compiled

    def _with_attributes(self, code: Code) -> Code:
        """Return ``code`` wrapped to append to its arguments the tensors that Dynamo left as attributes; without any, ``code`` itself.

        No Dynamo guard watches whether such a cache is compressed, so each call checks: a compressed cache that ``code`` does not take is
        decoded for the call, or made dense if the graph may write it.
        """
        if not self.attributes:
            return code
        first, tensors = len(self.examples) - len(self.attributes), self.attributes
        taken = {group.argument for group in code.groups} if isinstance(code, BoundGraph) else set()
        dense = tuple(
            first + place for place, tensor in enumerate(tensors)
            if first + place not in taken and not isinstance(tensor, torch.nn.Parameter)
        )
        captured, variants = self.record.captured, self.record.variants
        if captured is None:
            written = dict.fromkeys(dense, "it is an argument of a graph that was not rewritten (see the report)")
        else:
            written = written_handles(captured, self.effects if variants is None else variants.effects, dense)

        def run(*args: Any) -> Any:
            given = (*args, *tensors)
            if any(handles.is_handle(given[index]) for index in dense):
                return code(*handles.densify(given, dense, written))
            return code(*given)

        return run

    def _compiled(self) -> Code:
        started = time.perf_counter()
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.examples):
            return self._unchanged(Refusal(
                Stage.CAPTURE, "gradients are enabled, and a compressed cache has no backward", "the call of the compiled model",
                advice="call it under torch.no_grad() or torch.inference_mode()",
            ))
        options = f"{self.inner.mode}:{self.inner.options}"
        key = call_key(self.gm, self.examples, handles.is_handle, options)
        if key is not None and (known := self._known(key)) is not None:
            self.report.pass_seconds = time.perf_counter() - started
            return known
        try:
            with self.report.timing(Pass.CAPTURE):
                captured = capture(self.gm, self.examples, handles.is_handle, handles.can_take_over, len(self.attributes), is_returned)
        except Exception as error:
            log.debug("capture failed", exc_info=True)
            return self._unchanged(_fault(Stage.CAPTURE, "retraced", error))
        floats.require_constants(captured)
        try:
            trace_graph(self.report.index, "before", captured.module)
            with self.report.timing(Pass.MATCH):
                matched = match(captured)
            self.effects = matched.effects
            with self.report.timing(Pass.PLAN):
                planned = plan(matched, self.policy)
            with self.report.timing(Pass.VALIDATE):
                planned = self._validated(captured, matched, planned)
            # Two models of equal shapes get different keys: a CUDA graph contains the addresses of one model's parameters.
            salt = f"{options}:{identities(self.examples)}"
            variants = Variants(captured, planned, matched.effects, self.inner, self.memory.compiled, self.policy.spec(), salt)
            if planned.sites:
                variants.rewritten(Variant.PAST)
            described = graph_report(self.report.index, planned, matched.uncached)
        except Exception as error:
            if isinstance(error, KvcompileError) and not isinstance(error, (Unsupported, VerificationFailed)):
                raise
            log.debug("a graph could not be analysed", exc_info=True)
            # A fault of the analysis must not fail the user's program, unless ``strict``.
            self.report.refusals = (_fault(Stage.MATCH, "analysed", error),)
            self._announce()
            return self._dense(captured, None)
        self.record = GraphRecord(self.report, captured, planned, variants if planned.sites else None)
        self.report.sites, self.report.refusals, self.report.uncached = described.sites, described.refusals, described.uncached
        self.report.left_out = planned.left_out
        self._announce()
        self.report.pass_seconds = time.perf_counter() - started
        if not planned.sites:
            return self._dense(captured, matched.effects)
        try:
            bound = self._bound(variants)
        except NotCompiled as error:
            log.debug("a rewritten graph could not be compiled", exc_info=True)
            self.report.sites = ()
            self.report.refusals = (*self.report.refusals, _fault(Stage.LOWER, "compiled", error))
            self._announce()
            return self._dense(captured, matched.effects)
        if key is not None:
            self.memory.bound[key] = bound, self.record
        return bound

    def _known(self, key: str) -> BoundGraph | None:
        """Return the bound graph of an equal graph that was compiled before its caches were compressed; None if there is none.

        If there is one, this compilation's report and record take over the contents of that graph's.
        """
        if key not in self.memory.bound:
            return None
        bound, record = self.memory.bound[key]
        slots = {group.argument for group in bound.groups}
        if any(handles.is_handle(value) and index not in slots for index, value in enumerate(self.examples)):
            return None
        self.report.take(record.report)
        self.record = GraphRecord(self.report, record.captured, record.planned, record.variants)
        return bound

    def _validated(self, captured: Captured, matched: Matched, planned: Plan) -> Plan:
        """Return the plan without the sites that validation refuses.

        A site is refused if its twin differs, or cannot be run and the settings do not allow that. Records in the report which sites were
        validated.
        """
        if self.settings.validate is Validate.NEVER:
            return planned
        found = verdicts(captured, matched.effects, [item.site for item in planned.sites], self.examples, self.memory.verdicts)
        accepted = {SiteOutcome.EQUAL} | ({SiteOutcome.UNKNOWN} if self.settings.validate is Validate.WHERE_POSSIBLE else set())
        refused = {site.index: verdict for group, verdict in found if verdict.outcome not in accepted for site in group}
        self.report.unvalidated = tuple(
            f"{site.path or site.line}: {verdict.reason}" for group, verdict in found if verdict.outcome is SiteOutcome.UNKNOWN
            for site in group if site.index not in refused
        )
        self.report.validated = sum(len(group) for group, verdict in found if verdict.outcome is SiteOutcome.EQUAL)
        if any(verdict.differs_on_padding for _, verdict in found):
            self.report.notes = (BLIND,)
        if not refused:
            return planned
        refusals = tuple(
            Refusal(
                Stage.VALIDATE, f"{said}: {refused[item.site.index].reason}", item.site.line, item.site.path, item.site.attention.idiom,
                advice=advice,
            ) for item in planned.sites if item.site.index in refused for said, advice in (REFUSED[refused[item.site.index].outcome],)
        )
        kept = tuple(item for item in planned.sites if item.site.index not in refused)
        return Plan(kept, (*planned.refusals, *refusals), planned.left_out)

    def _announce(self) -> None:
        """Log each refusal once, and each site rewritten without validation. Raises SiteRefused for a refusal under ``strict``."""
        for refusal in self.report.refusals:
            if str(refusal) not in self.memory.reported:
                self.memory.reported[str(refusal)] = ""
                log.warning("kvcompile leaves an attention as it is: %s", refusal)
        if self.report.unvalidated:
            log.warning(
                "kvcompile rewrote %d attentions that it could not validate, the first: %s", len(self.report.unvalidated),
                self.report.unvalidated[0],
            )
        if self.settings.strict and self.report.refusals:
            listed = "\n".join(f"  {refusal}" for refusal in self.report.refusals)
            raise SiteRefused(count=len(self.report.refusals), refusals=listed)

    # --- without sites ---------------------------------------------------------------------------

    def _unchanged(self, refusal: Refusal) -> Code:
        """Record ``refusal`` and return Dynamo's graph, compiled as given.

        If the call has compressed caches, they become dense and the graph runs uncompiled. Raises SiteRefused under ``strict``.
        """
        self.report.refusals = (refusal,)
        self._announce()
        given = tuple(index for index, value in enumerate(self.examples) if handles.is_handle(value))
        if not given:
            constant = dict(enumerate(self.attributes, len(self.examples) - len(self.attributes)))
            constant = {index: tensor for index, tensor in constant.items() if isinstance(tensor, torch.nn.Parameter)}
            return self.inner(self.gm, self.examples, detect_fake_mode(self.examples), constant=constant)
        # The caches become dense in this call and Dynamo retraces for them in the next, so compiling this graph would not pay.
        module, why = unexposed(self.gm), f"it is an argument of a graph that was not rewritten: {refusal.reason}"

        def run(*args: Any) -> Any:
            return module.forward(*handles.densify(args, given, dict.fromkeys(given, why)))

        return run

    def _dense(self, captured: Captured, effects: Effects | None) -> Code:
        """Return the code of ``captured``, a graph without sites, compiled.

        Each of its calls decodes the compressed caches that it reads and makes those dense that it may write (``effects``). Logs a warning
        if calls decode caches.
        """
        given = tuple(entry.index for entry in captured.inputs if entry.compressed)
        if not given:
            return self.inner(self.gm, self.examples, captured.fake_mode, constant=parameters(captured.inputs))
        written = written_handles(captured, effects, given)
        if read := len(given) - len(written):
            log.warning("a graph without a rewritten site reads %d compressed cache tensors: they are decoded at every call", read)
        compiled = self.inner(captured.module, captured.fakes, captured.fake_mode, constant=parameters(captured.inputs))

        def run(*args: Any) -> Any:
            with DisableTorchFunctionSubclass():
                return compiled(*handles.densify(args, given, written))

        return run

    # --- with sites ------------------------------------------------------------------------------

    def _bound(self, variants: Variants) -> BoundGraph:
        """Return the rewritten graph as a callable; its variant for the first call is compiled here if that variant can be foreseen."""
        started = time.perf_counter()
        captured, planned, effects = variants.captured, variants.planned, variants.effects
        used = {part.slot.placeholder for item in planned.sites for part in item.parts}
        decode = tuple(entry.index for entry in captured.inputs if entry.compressed and entry.node not in used)
        written = written_handles(captured, effects, decode)
        bound = bind(
            captured, planned, effects, variants.rewritten(Variant.PAST), functools.partial(self._late, variants, self.report.sites),
            self.memory.growth, self.memory.live, decode, written,
        )
        adopted = {group.argument for group in bound.groups if group.kind.facts.adopted and group.argument is not None}
        accept_handles(captured, self.examples, adopted)
        bound.dense = DenseCalls(None if self.settings.strict else functools.partial(self._as_captured, captured), self.memory.reported)
        self.report.pass_seconds += time.perf_counter() - started
        likely = Variant.FRESH if bound.created_only else Variant.PAST if bound.with_past else None
        if likely is None and all(same(item.site.tokens, 1) for item in planned.sites):
            likely = Variant.PAST
        if likely is not None:
            bound.variants[likely] = variants.compiled(likely)
        return bound

    def _late(self, variants: Variants, sites: tuple[SiteReport, ...], variant: Variant) -> tuple[Rewritten, Code]:
        """Return a variant that a call needs first, compiled. Until one compiles, the report shows ``sites`` as refused.

        Raises NotCompiled.
        """
        try:
            made = variants.compiled(variant)
        except NotCompiled as error:
            fault = _fault(Stage.LOWER, "compiled", error)
            if not any(item in variants for item in Variant) and fault not in self.report.refusals:
                self.report.sites, self.report.refusals = (), (*self.report.refusals, fault)
            raise
        self.report.sites = sites
        self.report.refusals = tuple(item for item in self.report.refusals if item.stage is not Stage.LOWER)
        return made

    def _as_captured(self, captured: Captured) -> Code:
        """Return the captured graph compiled without its rewrite.

        The graph is left uncompiled if compiling would fix a size that no guard protects.
        """
        before = Beliefs.of(captured.fake_mode.shape_env)
        with compile_lock:
            code = self.inner(captured.module, captured.fakes, captured.fake_mode, constant=parameters(captured.inputs))
        return captured.module.forward if before.take_back() else code  # type: ignore[return-value]


REPORT = "please report this model with the output of TORCH_LOGS=+kvcompile"


def _fault(stage: Stage, done: str, error: Exception) -> Refusal:
    """Return a refusal of the whole graph because of ``error``; ``done``: the past participle of the step that failed, such as "captured".

    The advice is that of ``error`` if it is an error of kvcompile, else to report it.
    """
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, KvcompileError):
        said, _, advice = first.rpartition("; ")
        return Refusal(stage, f"the graph could not be {done}: {said or first}", "the captured graph", advice=advice if said else REPORT)
    return Refusal(stage, f"the graph could not be {done}: {type(error).__name__}: {first}", "the captured graph", advice=REPORT)
