"""The backend: capture, match, plan, rewrite, verify, lower, run; one page, in order.

    torch.compile(model, backend=kvcompile.backend(scheme="int4"))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from kvcompile.compilation import Compilation, Memory
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
from kvcompile.report import GraphReport, Report
from kvcompile.runtime.store.adaptive_store import AdaptiveStore
from kvcompile.runtime.store.growth import Growth
from kvcompile.runtime.store.live_caches import LiveCaches
from kvcompile.schemes import Certify, StoredTokens
from kvcompile.settings import Gluon, Inner, Settings, Validate
from kvcompile.validation.verdict_cache import VerdictCache

log = logging.getLogger(__name__)


class Backend:
    """A Dynamo backend for one policy and one set of settings; make it with ``kvcompile.backend``."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        # A rewritten graph calls its schemes' operations by name: they are defined before there can be one.
        plugins(scheme for _, pair in policy.pairs for scheme in (pair.k, pair.v))
        self.policy, self.settings = policy, settings
        self.graphs: list[GraphReport] = []
        self.records = records()
        self.paths: set[str] = set()
        # None once the modules of a graph are not known: nothing is known of a model then.
        self.modules: set[str] | None = set()
        self.checked = False
        # What Inductor would compile anew is validated anew as well; the other ways to run a graph keep nothing on disk.
        verdicts = VerdictCache(PersistentKeys("validated") if settings.inner is Inner.INDUCTOR else None)
        self.memory = Memory(LiveCaches(added_up), Growth(least=settings.reserve), Newest(), Newest(), verdicts)
        self.__name__ = "kvcompile"

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        # generate() copies its compile configuration; a copy would record graphs that nobody can see.
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
            # Dynamo comes back with another graph in place of this one.
            self.graphs.pop()
            raise
        except BaseException:
            self.records.append(graph.record)
            raise
        self.records.append(graph.record)
        self._check_policy(graph.report.paths, gm)
        return compiled

    def _check_policy(self, paths: set[str], gm: fx.GraphModule) -> None:
        """Hold the policy's entries against the model when an attention is met again: then one pass of the model was seen.

        Nothing less says so: graph breaks give each layer a graph of its own, and a backend may serve two models. An entry that matches no
        module raises EntryUnmatched. Of one that matches modules without a cache a warning is given, once; also where the modules are not
        known, as a draft may run the first layers alone.
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
        """Return the report: what was compiled so far, and the caches that live now."""
        report = Report(graphs=list(self.graphs), unmatched=self.policy.unmatched(self.paths) if self.paths else ())
        report.stayed_dense = tuple(f"{key[1]}: {why}" for key, why in self.memory.reported.items() if isinstance(key, tuple))
        for state in [group for live in self.memory.live for group in live.groups]:
            for store in state.stores.values():
                slot, tokens = store.spec.slot, state.length
                report.allocated += store.nbytes
                report.hosted += store.host_nbytes
                report.announced += store.announced(tokens)
                if isinstance(store, AdaptiveStore):
                    report.count_widths(slot.role, store.histogram(tokens), store.churn)
                    report.originals += store.original_nbytes
                report.dense += tokens * store.batch * slot.heads * slot.head_dim * slot.dtype.itemsize
                if tokens and store.never_calibrated:
                    report.never_calibrated.append(store.spec.scheme.uncalibrated)
        report.disorder = self._disorder()
        return report

    def _disorder(self) -> list[str]:
        """Return, and log, what came out of order in rows of live caches, once for the layers of a model. Waits for the device."""
        found: dict[tuple[object, ...], str] = {}
        for error in [error for state in self.memory.live if state.windowed for error in state.disorder()]:
            found.setdefault((error.facts["row"], error.facts["expected"], error.facts["found"]), str(error))
        for line in found.values():
            log.error("%s", line)
        return list(found.values())

    def stored_tokens(self) -> list[StoredTokens]:
        """Return the tokens of live caches of adaptive schemes, by module path; read them before the next step, which changes them."""
        found = [
            store.tokens(state.length, state.path) for state in self.memory.live for store in state.stores.values()
            if isinstance(store, AdaptiveStore)
        ]
        return sorted(found, key=lambda item: ordered(item.path))

    def telemetry(self) -> Telemetry:
        """Return what attention with a certificate did, and others reported, in all caches and layers so far; waits for the device."""
        self._disorder()
        return Telemetry.of(added_up([plane]) for plane in self.memory.live.telemetry_planes())

    def telemetry_of_heads(self) -> list[HeadTelemetry]:
        """Return the same of every batch row and kv head of the caches that live, ordered by module path; waits for the device."""
        found = [item for state in self.memory.live for plane in state.telemetry() for item in of_heads(state.path, *plane)]
        return sorted(found, key=HeadTelemetry.place)

    def certificates(self) -> list[HeadCertificate]:
        """Return the certificates of the last step of the caches that live, by module path, batch row and query head; waits for the device.

        A query head's newest query counts, and of a kv head its first 16 query heads. Before the first step there are none.
        """
        found = [item for state in self.memory.live for plane in state.telemetry() for item in certificates_of(state.path, *plane)]
        return sorted(found, key=HeadCertificate.place)


def backend(scheme: object = "int8", *, inner: str | Inner = Inner.INDUCTOR, strict: bool = False, mode: str | None = None,
            options: Mapping[str, Any] | None = None, reserve: int = 256, certify: Certify | None = None,
            validate: bool | str | Validate = True, fold: bool = False, gluon: str | Gluon = Gluon.MEASURED) -> Backend:
    """A Dynamo backend that stores KV caches as ``scheme`` says.

    ``scheme``: a name ("int4"), a spelled scheme ("int4(group=64)"), a Scheme, {"k": ..., "v": ...}, or
    {glob over module paths: any of these, or None to leave those attentions as they are}. A glob that matches no module of the model raises
    EntryUnmatched once an attention of it is compiled a second time, as a prompt's and a step's graph are.
    ``inner``: "inductor", "aot_eager" or "eager" compiles the
    rewritten graph. ``strict``: raise SiteRefused instead of leaving an attention dense. ``mode`` and
    ``options`` go to Inductor (torch.compile's own arguments win). ``reserve``: the least tokens a store
    holds. ``certify``: budgets and checks of the scheme "certified"; of other bounded schemes, which keep no originals, with
    ``fallback="report"`` only: every step over codes then adds the bounds of its error to ``Backend.telemetry``, and budgets are
    counted where they are passed. ``validate``: True runs every site beside its rewritten twin over small random tokens when it is
    compiled, and leaves it as it is where the two differ or could not be run beside each other; "where possible" rewrites what could not
    be run, with a warning; False runs nothing. ``fold``: compile equal layers once; off by default, as it was not measured on CUDA.
    ``gluon``: "measured", "always" or "never" says which attentions of one new token the Gluon kernel runs on CUDA (``settings.Gluon``);
    "never" leaves them to the Triton template, whatever the kernel's fault may be.
    Raises a SchemeError before anything is compiled.
    """
    policy = policy_of(scheme) if certify is None else certifying(policy_of(scheme), certify)
    made = Settings(
        Inner.of(inner), strict, mode, dict(options or {}), reserve, validate=Validate.of(validate), fold=fold, gluon=Gluon.of(gluon),
    )
    return Backend(policy, made)
