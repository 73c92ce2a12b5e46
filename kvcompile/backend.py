"""The backend: one object per policy and settings, which Dynamo calls with each graph; reports and telemetry of all its graphs.

    torch.compile(model, backend=kvcompile.backend(scheme="int4"))
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from kvcompile.compilation import BackendState, Compilation
from kvcompile.details import detail_of
from kvcompile.errors import EntryUnmatched
from kvcompile.lowering.attention_plugins import plugins
from kvcompile.lowering.certificate.summary import HeadCertificate, HeadTelemetry, Telemetry, certificates_of, of_heads, ordered
from kvcompile.lowering.certificate.telemetry import added_up
from kvcompile.lowering.persistent_keys import PersistentKeys
from kvcompile.passes.capture.module_names import module_names
from kvcompile.passes.graph.dynamo import TensorifyScalarRestartAnalysis
from kvcompile.passes.plan.certify import certifying
from kvcompile.passes.plan.policy import Policy, policy_of
from kvcompile.records import Newest, records
from kvcompile.report import GraphDetail, GraphReport, Report
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches, distinct_planes
from kvcompile.schemes import Certify, StoredTokens
from kvcompile.settings import Gluon, Inner, Settings, Validate
from kvcompile.trace_artifacts import trace_report
from kvcompile.validation.verdict_cache import VerdictCache

log = logging.getLogger(__name__)


class Backend:
    """A Dynamo backend for one policy and one set of settings; make it with ``kvcompile.backend``."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        # A rewritten graph calls its schemes' operations by name, so they are registered before the first graph.
        plugins(scheme for _, pair in policy.pairs for scheme in (pair.k, pair.v))
        self.policy, self.settings = policy, settings
        self.graphs: list[GraphReport] = []
        self.records = records()
        self.paths: set[str] = set()
        # Module paths seen so far; None once a graph did not say its modules: then no entry can be called unmatched.
        self.modules: set[str] | None = set()
        self.checked = False
        # Verdicts are kept on disk under the same conditions as Inductor's code; the other inner compilers keep nothing on disk.
        verdicts = VerdictCache(PersistentKeys("validated") if settings.inner is Inner.INDUCTOR else None)
        self.memory = BackendState(LiveCaches(added_up), Growth(least=settings.reserve), Newest(), Newest(), verdicts)
        self.__name__ = "kvcompile"

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        # generate() copies its compile configuration; a copied backend would record graphs that the user's object does not show.
        return self

    def __copy__(self) -> Backend:
        return self

    def __call__(
        self, gm: fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        graph = Compilation(gm, example_inputs, self.policy, self.settings, self.memory, len(self.graphs), mode, options)
        self.graphs.append(graph.report)
        try:
            compiled = graph.run()
        except TensorifyScalarRestartAnalysis:
            # Dynamo retraces and calls again with another graph for the same code.
            self.graphs.pop()
            raise
        except BaseException:
            self.records.append(graph.record)
            raise
        self.records.append(graph.record)
        trace_report(graph.report)
        self._check_policy(graph.report.paths, gm)
        return compiled

    def _check_policy(self, paths: set[str], gm: fx.GraphModule) -> None:
        """Raise EntryUnmatched for a policy entry that matches no module of the model, once an attention is compiled a second time.

        A second compilation of one module path means that the whole model was compiled once; before that, graph breaks may still add
        layers, and one backend may serve two models. An entry that matches modules, but none with a cached attention, is only warned about,
        once; so is every unmatched entry if the model's modules are not known, since a draft model may run the first layers alone.
        ``paths``: module paths of the attentions of the graph ``gm``.
        """
        if not paths or not self.policy.unmatched(()):
            return
        again = bool(paths & self.paths)
        self.paths |= paths
        names = module_names(gm)
        self.modules = None if names is None or self.modules is None else self.modules | names
        if not again:
            return
        for glob in self.policy.unmatched(self.paths):
            known = ", ".join(sorted(self.paths, key=ordered)[:3])
            if self.modules is not None and glob in self.policy.unmatched(self.modules):
                raise EntryUnmatched(glob=glob, count=len(self.modules), paths=known)
            if not self.checked:
                log.warning("the policy's entry %r matches none of the attentions of this model, which are %s, ...", glob, known)
        self.checked = True

    def report(self) -> Report:
        """Return a Report of all graphs compiled so far and of the caches that are alive."""
        self.memory.live.measure()
        unmatched = self.policy.unmatched(self.paths) if self.paths else ()
        report = Report(graphs=list(self.graphs), peak=self.memory.live.peak, unmatched=unmatched, source=weakref.ref(self))
        report.stayed_dense = tuple(f"{key[1]}: {why}" for key, why in self.memory.reported.items() if isinstance(key, tuple))
        states, held = list(self.memory.live), 0
        for plane, spec in distinct_planes(states):
            size = plane.untyped_storage().nbytes()
            report.allocated += size
            report.hosted += size if spec.host and plane.is_cuda else 0
        announced: set[int] = set()
        for state in [group for live in states for group in live.groups]:
            # A window's tensor holds its slots, however many tokens it has seen.
            shown = state.length if state.slots is None else min(state.length, state.slots)
            report.dense += state.dense_nbytes(shown)
            report.callers += state.dense_nbytes(max(state.places, shown))
            held += sum(store.nbytes for store in state.stores.values())
            for store in state.stores.values():
                slot, tokens = store.spec.slot, state.length
                # Forks that share their codes are announced once.
                once = id(store.planes[0]) not in announced
                announced.add(id(store.planes[0]))
                report.announced += store.announced(tokens) if once else 0
                if isinstance(store, AdaptiveStore):
                    report.count_widths(slot.role, store.histogram(tokens), store.churn)
                    report.originals += store.original_nbytes if once else 0
                if tokens and store.never_calibrated:
                    report.never_calibrated.append(store.spec.scheme.uncalibrated)
        report.shared = held - report.allocated
        report.disorder = self._disorder()
        return report

    def _disorder(self) -> list[str]:
        """Return an error message for each row of a live cache whose tokens came out of order, each once; log each.

        Layers with the same message count once. Waits for the device.
        """
        found: dict[tuple[object, ...], str] = {}
        for error in [error for state in self.memory.live if state.windowed for error in state.disorder()]:
            found.setdefault((error.facts["row"], error.facts["expected"], error.facts["found"]), str(error))
        for line in found.values():
            log.error("%s", line)
        return list(found.values())

    def detail(self, index: int) -> GraphDetail | None:
        """Return graph ``index`` as text, before and after the rewrite, with its kernels; None if its record is gone."""
        return detail_of(self.records, index)

    def telemetry_text(self) -> str:
        """Return ``telemetry`` as text, "" without head-steps. Waits for the device."""
        found = self.telemetry()
        return str(found) if found["head_steps"] else ""

    def stored_tokens(self) -> list[StoredTokens]:
        """Return the stored tokens of live caches with an adaptive scheme, ordered by module path.

        The next step changes them: read them before it.
        """
        found = [
            store.tokens(state.length, state.path) for state in self.memory.live for store in state.stores.values()
            if isinstance(store, AdaptiveStore)
        ]
        return sorted(found, key=lambda item: ordered(item.path))

    def telemetry(self) -> Telemetry:
        """Return the telemetry of certified and of reporting attention, summed over all caches, layers and steps so far.

        Waits for the device.
        """
        self._disorder()
        return Telemetry.of(added_up([plane]) for plane in self.memory.live.telemetry_planes())

    def telemetry_of_heads(self) -> list[HeadTelemetry]:
        """Return the telemetry of each batch row and kv head of the live caches, ordered by module path. Waits for the device."""
        found = [item for state in self.memory.live for plane in state.telemetry() for item in of_heads(state.path, *plane)]
        return sorted(found, key=HeadTelemetry.place)

    def certificates(self) -> list[HeadCertificate]:
        """Return the certificates of the last step of the live caches, by module path, batch row and query head. Waits for the device.

        One certificate per query head, for its newest query; of a kv head only the first 16 query heads have one. Empty before the first
        step.
        """
        found = [item for state in self.memory.live for plane in state.telemetry() for item in certificates_of(state.path, *plane)]
        return sorted(found, key=HeadCertificate.place)


def backend(scheme: object = "int8", *, inner: str | Inner = Inner.INDUCTOR, strict: bool = False, mode: str | None = None,
            options: Mapping[str, Any] | None = None, reserve: int = 256, certify: Certify | None = None,
            validate: bool | str | Validate = True, fold: bool = False, gluon: str | Gluon = Gluon.MEASURED) -> Backend:
    """Return a Dynamo backend that stores KV caches in ``scheme``. Raises a SchemeError before anything is compiled.

    ``scheme``: a name ("int4"), a scheme as text ("int4(group=64)"), a Scheme, {"k": ..., "v": ...}, or a per-layer policy {glob over
        module paths: any of these, or None to leave these attentions unchanged}. A glob that matches no module of the model raises
        EntryUnmatched once one of its attentions is compiled a second time (prompt and step are usually two graphs).
    ``inner``: the compiler of the rewritten graph: "inductor", "aot_eager" or "eager".
    ``strict``: raise SiteRefused instead of leaving an attention dense.
    ``mode``, ``options``: passed to Inductor; torch.compile's own arguments win.
    ``reserve``: the smallest number of tokens that a store allocates.
    ``certify``: budgets and checks of the scheme "certified". Other bounded schemes, which keep no full-precision copy, take it with
        ``fallback="report"`` only: each step then adds its error bounds to ``Backend.telemetry`` and counts the budgets that it exceeds.
        None: no certificates but those of the scheme's defaults.
    ``validate``: True runs each site and its rewritten twin on small random tokens when it is compiled, and leaves the site unchanged if
        they differ or cannot be run; "where possible" rewrites, with a warning, sites that cannot be run; False runs nothing.
    ``fold``: compile equal layers once. Off by default: it was not measured on CUDA.
    ``gluon``: "measured", "always" or "never": which attentions of one new token run in the Gluon kernel on CUDA (``settings.Gluon``).
        "never" leaves all to the Triton template, as a way around a fault of the kernel.
    """
    policy = policy_of(scheme) if certify is None else certifying(policy_of(scheme), certify)
    made = Settings(
        Inner.of(inner), strict, mode, dict(options or {}), reserve, validate=Validate.of(validate), fold=fold, gluon=Gluon.of(gluon),
    )
    return Backend(policy, made)
