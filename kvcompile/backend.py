"""The backend: capture, match, plan, rewrite, verify, lower, run; one page, in order.

    torch.compile(model, backend=kvcompile.backend(scheme="int4"))
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from kvcompile.errors import KvcompileError, NotCompiled, SiteRefused, Unsupported
from kvcompile.lowering.attend_kernels import kernel_lines
from kvcompile.lowering.certificate.telemetry import Telemetry, added_up
from kvcompile.lowering.compile import compile_graph, compiling
from kvcompile.lowering.remembered import Remembered
from kvcompile.lowering.reuse import call_key, fingerprint, identities
from kvcompile.passes.capture.capture import Captured, capture
from kvcompile.passes.capture.nested import inlined
from kvcompile.passes.capture.retrace import unexposed
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.match.match import Matched, match
from kvcompile.passes.match.sites import Refusal, SlotKind, Stage
from kvcompile.passes.plan.certify import certifying
from kvcompile.passes.plan.plan import Plan, Policy, plan, policy_of
from kvcompile.passes.rewrite.replay import gap, steady_inputs
from kvcompile.passes.rewrite.rewrite import rewrite
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.passes.verify import verify
from kvcompile.report import GraphReport, Report, graph_report
from kvcompile.runtime import adoption
from kvcompile.runtime import handle as handles
from kvcompile.runtime.adoption import Left
from kvcompile.runtime.binding import bind
from kvcompile.runtime.bound import BoundGraph
from kvcompile.runtime.growth import Growth
from kvcompile.runtime.guards import accept_handles
from kvcompile.runtime.ledger import Ledger
from kvcompile.runtime.views import DecodedView, over_tensors
from kvcompile.schemes import Certify
from kvcompile.settings import Inner, Settings
from kvcompile.validation import Outcome, Verdict, verdicts
from kvcompile.validation.known import Known

log = logging.getLogger(__name__)

PAGES_HINT = 64
BLIND = (
    "queries that see no token (left padding) give zeros here, and something else in the uncompiled model, whose mask is a finite number; "
    "nobody reads them where padding stays hidden"
)


class Backend:
    """A Dynamo backend for one policy and one set of settings; make it with ``kvcompile.backend``."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.graphs: list[GraphReport] = []
        self.stages: list[dict[str, Any]] = []
        self.live = Ledger(added_up)
        self.growth = Growth(least=settings.reserve)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.bound: dict[str, tuple[BoundGraph, GraphReport, dict[str, Any]]] = {}
        # What Inductor would compile anew is validated anew as well; the other ways to run a graph keep nothing on disk.
        self.verdicts: dict[str, Verdict] = Known(Remembered("validated") if settings.inner is Inner.INDUCTOR else None)
        self.__name__ = "kvcompile"

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        # generate() copies its compile configuration; a copy would record graphs that nobody can see.
        return self

    def __copy__(self) -> Backend:
        return self

    def __call__(
        self, gm: fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        return _Compilation(self, gm, example_inputs, mode, options).run()

    def report(self) -> Report:
        """Return the report: what was compiled so far, and the caches that live now."""
        report = Report(graphs=list(self.graphs))
        for state in self.live:
            for store in state.stores.values():
                report.allocated += store.nbytes
                report.hosted += store.host_nbytes
                report.announced += store.spec.layout.nbytes(store.pages, store.batch, store.spec.slot.heads)
                tokens = state.length
                report.dense += tokens * store.batch * store.spec.slot.heads * store.spec.slot.head_dim * store.spec.slot.dtype.itemsize
                report.untaught += bool(tokens) and store.untaught
        return report

    def telemetry(self) -> Telemetry:
        """Return what certified attention did, and others reported, in all caches and layers so far; waits for the device."""
        return Telemetry.of(added_up([told]) for told in self.live.tellings())


class _Compilation:
    """One graph on its way through the pipeline."""

    def __init__(
        self, owner: Backend, gm: fx.GraphModule, example_inputs: list[Any], mode: str | None, options: dict[str, Any] | None
    ) -> None:
        self.owner, self.gm, self.examples, self.mode, self.options = owner, inlined(gm), example_inputs, mode, options
        self.settings = owner.settings
        self.salt = ""
        self.report = GraphReport(len(owner.graphs))
        owner.graphs.append(self.report)
        self.stage: dict[str, Any] = {}
        owner.stages.append(self.stage)

    def run(self) -> Callable[..., Any]:
        """The callable that Dynamo runs in place of the graph."""
        views = any(type(value) is DecodedView for value in self.examples)
        try:
            compiled = self._compiled()
        finally:
            # The real arguments, caches among them, must not live as long as the compiled graph does.
            self.examples = []
        return over_tensors(compiled) if views else compiled

    def _compiled(self) -> Callable[..., Any]:
        started = time.perf_counter()
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.examples):
            return self._unchanged(Refusal(
                Stage.CAPTURE, "gradients are on, and a compressed cache has none", "the call of the compiled model",
                advice="call it under torch.no_grad() or torch.inference_mode()",
            ))
        settled = f"{self.mode}:{self.options}"
        key = call_key(self.gm, self.examples, handles.is_handle, settled)
        if key is not None and (known := self._known(key)) is not None:
            self.report.pass_seconds = time.perf_counter() - started
            return known
        # Two models of one shape do not share a callable: a CUDA graph holds the addresses of one.
        self.salt = f"{settled}:{identities(self.examples)}"
        try:
            captured = capture(self.gm, self.examples, handles.is_handle, handles.can_take_over)
        except Exception as error:
            log.debug("capture failed", exc_info=True)
            return self._unchanged(_fault(Stage.CAPTURE, "retraced", error))
        try:
            matched = match(captured)
            planned = plan(matched, self.owner.policy)
            planned = self._validated(captured, matched, planned)
            past = rewrite(captured, planned, Variant.PAST, matched.effects) if planned.sites else None
        except Exception as error:
            if isinstance(error, KvcompileError) and not isinstance(error, Unsupported):
                raise
            log.debug("a graph could not be analysed", exc_info=True)
            # Never an error of the program, unless ``strict``.
            self.report.refusals = (_fault(Stage.MATCH, "analysed", error),)
            self._announce()
            return self._dense(captured, None)
        self.stage.update(captured=captured, matched=matched, plan=planned)
        described = graph_report(self.report.index, planned, matched.uncached)
        self.report.sites, self.report.refusals, self.report.uncached = described.sites, described.refusals, described.uncached
        self._announce()
        self.report.pass_seconds = time.perf_counter() - started
        if past is None:
            return self._dense(captured, matched.effects)
        try:
            bound = self._bind(captured, matched, planned, past)
        except NotCompiled as error:
            log.debug("a rewritten graph could not be compiled", exc_info=True)
            self.report.sites = ()
            self.report.refusals = (*self.report.refusals, _fault(Stage.LOWER, "compiled", error))
            self._announce()
            return self._dense(captured, matched.effects)
        if key is not None:
            self.owner.bound[key] = (bound, self.report, self.stage)
        return bound

    def _known(self, key: str) -> BoundGraph | None:
        """The callable of this very graph from before its caches were compressed, if there is one."""
        if key not in self.owner.bound:
            return None
        bound, report, stage = self.owner.bound[key]
        slots = {group.argument for group in bound.groups}
        if any(handles.is_handle(value) and index not in slots for index, value in enumerate(self.examples)):
            return None
        self.report.sites, self.report.refusals, self.report.uncached = report.sites, report.refusals, report.uncached
        self.report.variants, self.report.kernels = report.variants, report.kernels
        self.report.validated, self.report.unvalidated, self.report.notes = report.validated, report.unvalidated, report.notes
        self.stage.update(stage)
        return bound

    def _validated(self, captured: Captured, matched: Matched, planned: Plan) -> Plan:
        """The plan without the sites whose rewritten twin does something else than they do."""
        if not self.settings.validate:
            return planned
        found = verdicts(captured, matched.effects, [item.site for item in planned.sites], self.examples, self.owner.verdicts)
        refused = {site.index: verdict.reason for group, verdict in found if verdict.outcome is Outcome.DIFFERENT for site in group}
        self.report.unvalidated = tuple(
            f"{site.path or site.line}: {verdict.reason}" for group, verdict in found if verdict.outcome is Outcome.UNKNOWN
            for site in group
        )
        self.report.validated = sum(len(group) for group, verdict in found if verdict.outcome is Outcome.EQUAL)
        if any(verdict.blind for _, verdict in found):
            self.report.notes = (BLIND,)
        if not refused:
            return planned
        refusals = tuple(
            Refusal(
                Stage.VALIDATE, f"its rewritten twin does something else: {refused[item.site.index]}", item.site.line, item.site.path,
                item.site.attention.idiom, advice="please report this module: the matcher reads it wrongly",
            ) for item in planned.sites if item.site.index in refused
        )
        return Plan(tuple(item for item in planned.sites if item.site.index not in refused), (*planned.refusals, *refusals))

    def _announce(self) -> None:
        for refusal in self.report.refusals:
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

    def _unchanged(self, refusal: Refusal) -> Callable[..., Any]:
        """The graph as Dynamo gave it, compiled as it is; run as it is where it was traced for compressed caches, which become dense."""
        self.report.refusals = (refusal,)
        self._announce()
        given = tuple(index for index, value in enumerate(self.examples) if handles.is_handle(value))
        if given:
            # Dynamo traces the next call for the dense tensors: this one is not worth compiling.
            module, why = unexposed(self.gm), f"a graph takes it that is left as it was: {refusal.reason}"

            def run(*args: Any) -> Any:
                return module.forward(*handles.in_full(args, given, dict.fromkeys(given, why)))

            return run
        started = time.perf_counter()
        compiled = self._inner(self.gm, self.examples, torch._guards.detect_fake_mode(self.examples), "")
        self.report.compile_seconds += time.perf_counter() - started
        return compiled

    def _dense(self, captured: Captured, effects: Effects | None) -> Callable[..., Any]:
        """A graph without sites; compressed caches that reach it are decoded for it, each call, or dense again where it writes them."""
        given = tuple(entry.index for entry in captured.inputs if entry.compressed)
        started = time.perf_counter()
        if not given:
            compiled = self._inner(self.gm, self.examples, captured.fake_mode, "")
            self.report.compile_seconds += time.perf_counter() - started
            return compiled
        written = adoption.written(captured, effects, given)
        if read := len(given) - len(written):
            log.warning("a graph without a rewritten site reads %d compressed cache tensors: they are decoded at every call", read)
        compiled = self._inner(captured.module, captured.fakes, captured.fake_mode, "")
        self.report.compile_seconds += time.perf_counter() - started

        def run(*args: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return compiled(*handles.in_full(args, given, written))

        return run

    def _inner(self, module: fx.GraphModule, inputs: Any, fake_mode: Any, key: str, replayed: bool = True) -> Callable[..., Any]:
        return compile_graph(
            module, inputs, fake_mode, self.settings, mode=self.mode, options=self.options, plan=key, replayed=replayed
        )

    # --- with sites ------------------------------------------------------------------------------

    def _bind(self, captured: Captured, matched: Matched, planned: Plan, first: Rewritten) -> BoundGraph:
        effects = matched.effects
        started = time.perf_counter()
        used = {part.slot.placeholder for item in planned.sites for part in item.parts}
        decode = tuple(entry.index for entry in captured.inputs if entry.compressed and entry.node not in used)
        written = adoption.written(captured, effects, decode)
        made: dict[Variant, Rewritten] = {Variant.PAST: first}
        failed: dict[Variant, NotCompiled] = {}

        def compile_variant(variant: Variant) -> tuple[Rewritten, Callable[..., Any]]:
            if variant in failed:
                raise failed[variant]
            # A variant may be made in the middle of a call, where Dynamo does not hold its lock; tracing is not thread-safe.
            with compile_lock:
                try:
                    return self._variant(captured, planned, effects, variant, made)
                except NotCompiled as error:
                    failed[variant] = error
                    raise

        # For ``dump``, which may show the variant that no call needed.
        self.stage["compile_variant"] = compile_variant
        bound = bind(captured, planned, effects, first, compile_variant, self.owner.growth, self.owner.live, decode, written)
        adopted = {group.argument for group in bound.groups if group.kind is SlotKind.BUFFER and group.argument is not None}
        accept_handles(captured, self.examples, adopted)
        bound.left = Left(None if self.settings.strict else functools.partial(self._as_captured, captured))
        self.report.pass_seconds += time.perf_counter() - started
        likely = Variant.FRESH if bound.born_only else Variant.PAST if bound.with_past else None
        if likely is None and all(item.site.tokens == 1 for item in planned.sites):
            likely = Variant.PAST
        if likely is not None:
            bound.variants[likely] = compile_variant(likely)
        return bound

    def _as_captured(self, captured: Captured) -> Callable[..., Any]:
        """The graph without its rewrite, compiled when a call first needs it."""
        with compile_lock:
            started = time.perf_counter()
            compiled = self._inner(captured.module, captured.fakes, captured.fake_mode, "")
            self.report.compile_seconds += time.perf_counter() - started
            return compiled

    def _variant(
        self, captured: Captured, planned: Plan, effects: Effects, variant: Variant, made: dict[Variant, Rewritten]
    ) -> tuple[Rewritten, Callable[..., Any]]:
        started = time.perf_counter()
        if variant not in made:
            made[variant] = rewrite(captured, planned, variant, effects)
        rewritten = made[variant]
        fakes, symbols = _fakes(captured, rewritten)
        _mark(captured, rewritten, steady_inputs(captured, effects))
        if self.settings.verify:
            verify(rewritten, captured, fakes)
        self.stage[variant.value] = rewritten
        self.stage[variant.value + "_fakes"] = fakes
        self.report.pass_seconds += time.perf_counter() - started
        started = time.perf_counter()
        # Before it is compiled: Inductor's passes change the graph.
        text = kernel_text(rewritten, len(planned.sites), self.settings.inner)
        key = f"{self.owner.policy.spell()}:{variant.value}"
        print_key = fingerprint(rewritten.module, fakes, symbols, f"{key}:{self.salt}")
        compiled = self.owner.compiled.get(print_key) if print_key is not None else None
        if compiled is None:
            with compiling():
                compiled = self._inner(rewritten.module, fakes, captured.fake_mode, key, replayed=gap(rewritten, captured) is None)
            _forget_guards(captured, symbols)
            if print_key is not None:
                self.owner.compiled[print_key] = compiled
        self.report.variants = (*self.report.variants, variant.value)
        self.report.kernels = (*self.report.kernels, text)
        self.report.compile_seconds += time.perf_counter() - started
        return rewritten, compiled


def _fault(stage: Stage, done: str, error: Exception) -> Refusal:
    """Return the refusal of a whole graph that a fault of this package kept from being ``done``."""
    first = next(iter(str(error).splitlines()), "")
    return Refusal(
        stage, f"the graph could not be {done}: {type(error).__name__}: {first}", "the captured graph",
        advice="please report this model with the output of TORCH_LOGS=+kvcompile",
    )


def _fakes(captured: Captured, rewritten: Rewritten) -> tuple[tuple[Any, ...], dict[Any, str]]:
    """(fake values of the rewritten graph's inputs, a name for each symbol of ours): stores that grow alike share one number of pages."""
    mode = captured.fake_mode
    pages: dict[int | None, Any] = {}
    symbols: dict[Any, str] = {}
    planes = []
    for end in dict.fromkeys(item.plan.end for item in rewritten.bindings):
        pages[end] = PAGES_HINT
        if mode.shape_env is not None:
            # Named by the variant, not counted: a graph has a shape environment of its own, and a name that depended on
            # what was compiled before would miss Inductor's cache on disk.
            source = ConstantSource(f"kvcompile_pages_{rewritten.variant.value}" + (f"_{end}" if end is not None else ""))
            symbol = mode.shape_env.create_symbol(PAGES_HINT, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            symbols[symbol] = f"N{end if end is not None else ''}"
            pages[end] = mode.shape_env.create_symintnode(symbol, hint=PAGES_HINT, source=source)
    with mode:
        for item in rewritten.bindings:
            slot = item.plan.slot
            root = value_of(slot.root)
            batch = root.shape[slot.axes.labels.index(("B",))] if ("B",) in slot.axes.labels else 1
            planes += [
                torch.empty(spec.shape(pages[item.plan.end], batch, item.plan.spec.heads), dtype=spec.dtype, device=root.device)
                for spec in item.plan.layout.planes
            ]
        planes += [torch.empty(1, dtype=torch.int64, device=planes[0].device) for _ in rewritten.cursors]
    sizes = [_symint(mode, symbol) for symbol in rewritten.sizes]
    return (*[_canonical(mode, captured.fakes[index]) for index in rewritten.kept], *planes, *sizes), symbols


def _symint(mode: Any, expr: Any) -> torch.SymInt:
    """A symbolic int of an expression whose symbols the shape environment knows."""
    return mode.shape_env.create_symintnode(expr, hint=None)


def _canonical(mode: Any, value: Any) -> Any:
    """A symbolic int under the name that the tracer settled on for it, which is the one that code of the graph uses."""
    if not isinstance(value, torch.SymInt) or value.node.expr == value.node._expr or value.node.expr.is_number:
        return value
    return _symint(mode, value.node.expr)


STATIC = "_dynamo_static_input_type"
"""The mark of an input whose address stays from call to call; "unguarded" ones are looked at before a CUDA graph is replayed."""


def _mark(captured: Captured, rewritten: Rewritten, steady: Collection[int]) -> None:
    """Give the inputs what AOTAutograd and CUDA graphs look for: sources, and which addresses stay."""
    module, origin = rewritten.module, captured.origin
    for name in ("dynamo_compile_id", "dynamo_flat_name_to_original_fqn"):
        if name in origin.meta:
            module.meta[name] = origin.meta[name]
    constants = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    module._param_name_to_source = {name: ConstantSource(name) for name in constants}  # type: ignore[assignment]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    for node, index in zip(placeholders, rewritten.kept, strict=False):
        old = captured.inputs[index].placeholder
        node._dynamo_source = getattr(old, "_dynamo_source", None)  # type: ignore[attr-defined]
        if "tensor_dict" in old.meta:
            node.meta["tensor_dict"] = old.meta["tensor_dict"]
        if index in steady:
            node.meta["tensor_dict"] = {STATIC: "unguarded"} | node.meta.get("tensor_dict", {})
    own = placeholders[len(rewritten.kept) :]
    for node in own:
        node._dynamo_source = None  # type: ignore[attr-defined]
    # Cursors and sizes are made anew for every call.
    for node in own[: len(own) - len(rewritten.cursors) - len(rewritten.sizes)]:
        node.meta["tensor_dict"] = {STATIC: "unguarded"}


def _forget_guards(captured: Captured, symbols: Collection[Any]) -> None:
    """The numbers of pages are ours: no guard on them may reach Dynamo, which does not know the symbols."""
    env = captured.fake_mode.shape_env
    if env is None or not symbols:
        return
    ours = [guard for guard in env.guards if guard.expr.free_symbols & set(symbols)]
    for guard in ours:
        log.debug("a guard on the number of pages is dropped: %s", guard.expr)
        env.guards.remove(guard)


VARIANTS = {Variant.PAST: "over a filled cache", Variant.FRESH: "into an empty cache"}


def kernel_text(rewritten: Rewritten, sites: int, inner: Inner = Inner.INDUCTOR) -> str:
    """In which case a rewritten graph runs, which operations its sites became, and what runs those under ``inner``, with the reason."""
    device = value_of(rewritten.bindings[0].plan.slot.root).device.type
    slots = {binding.plan.scheme.spell(): binding.plan.spec for binding in rewritten.bindings}
    return f"{VARIANTS[rewritten.variant]}: {kernel_lines(rewritten.module.graph, device, slots, sites, inner is Inner.INDUCTOR)}"


def backend(scheme: object = "int8", *, inner: str | Inner = Inner.INDUCTOR, strict: bool = False, mode: str | None = None,
            options: Mapping[str, Any] | None = None, reserve: int = 256, certify: Certify | None = None,
            validate: bool = True, fold: bool = False) -> Backend:
    """A Dynamo backend that stores KV caches as ``scheme`` says.

    ``scheme``: a name ("int4"), a spelled scheme ("int4(group=64)"), a Scheme, {"k": ..., "v": ...}, or
    {glob over module paths: any of these}. ``inner``: "inductor", "aot_eager" or "eager" compiles the
    rewritten graph. ``strict``: raise SiteRefused instead of leaving an attention dense. ``mode`` and
    ``options`` go to Inductor (torch.compile's own arguments win). ``reserve``: the least tokens a store
    holds. ``certify``: budgets and checks of the scheme "certified"; of other bounded schemes, which keep no originals, with
    ``fallback="report"`` only: every step over codes then adds the bounds of its error to ``Backend.telemetry``, and budgets are
    counted where they are passed. ``validate``: run every site beside its rewritten twin over small random tokens when it is compiled,
    and leave it as it is where the two differ. ``fold``: compile equal layers once; not yet tried on CUDA.
    Raises a SchemeError before anything is compiled.
    """
    policy = policy_of(scheme) if certify is None else certifying(policy_of(scheme), certify)
    return Backend(policy, Settings(Inner.of(inner), strict, mode, dict(options or {}), reserve, validate=validate, fold=fold))
