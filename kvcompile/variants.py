"""Variants: the rewritten graphs of one plan, each rewritten and compiled when a call first needs it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from kvcompile.errors import NotCompiled, SizesFixed
from kvcompile.lowering.attend_kernels import kernel_lines, kernelless
from kvcompile.lowering.compile import compile_graph, compiling, gluon_choice
from kvcompile.lowering.gluon.eligibility import GluonSettings, choosing
from kvcompile.lowering.graph_cache import fingerprint
from kvcompile.lowering.host.inductor_entry import uncached
from kvcompile.passes.capture.capture import Captured, Input
from kvcompile.passes.capture.floats import constant_floats
from kvcompile.passes.graph.dynamo import compile_lock
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.late_guards import Beliefs
from kvcompile.passes.graph.shapes import value_of
from kvcompile.passes.plan.plan import Plan
from kvcompile.passes.rewrite.inputs import forget_guards, mark_inputs, rewritten_inputs
from kvcompile.passes.rewrite.replay import gap, steady_inputs
from kvcompile.passes.rewrite.rewrite import rewrite
from kvcompile.passes.rewrite.rewritten import Rewritten, Variant
from kvcompile.passes.verify import verify
from kvcompile.report import GraphReport, Pass
from kvcompile.settings import Inner, Settings
from kvcompile.trace_artifacts import trace_graph
from kvcompile.types import SlotSpec

log = logging.getLogger(__name__)

Code = Callable[..., Any]

TITLES = {Variant.PAST: "over a filled cache", Variant.FRESH: "into an empty cache"}


def kernel_text(rewritten: Rewritten, sites: int, inner: Inner = Inner.INDUCTOR, choice: GluonSettings | None = None) -> str:
    """Return a line for the report: the variant, the operations that its ``sites`` became, and the kernels that run them with the reason.

    ``choice``: the compilation's settings for the Gluon kernel; None for those of ``torch.compile`` without a mode.
    """
    device, slots = _stored(rewritten)
    with choosing(choice or GluonSettings()):
        return f"{TITLES[rewritten.variant]}: {kernel_lines(rewritten.module.graph, device, slots, sites, inner is Inner.INDUCTOR)}"


def _stored(rewritten: Rewritten) -> tuple[str, dict[str, SlotSpec]]:
    """Return (type of a variant's device, {scheme's text: slot} of its stores)."""
    device = value_of(rewritten.bindings[0].plan.slot.root).device.type
    return device, {binding.plan.scheme.spec(): binding.plan.spec for binding in rewritten.bindings}


@functools.cache
def warn_once(line: str) -> None:
    """Log a warning, unless this process has logged the same line before."""
    log.warning("%s", line)


def slow_schemes(rewritten: Rewritten, inner: Inner = Inner.INDUCTOR) -> tuple[str, ...]:
    """Return a warning for each scheme of a variant without a kernel on its device, if another scheme has one there.

    Empty unless Inductor compiles, as other inner compilers run the eager bodies of all schemes.
    """
    return kernelless(rewritten.module.graph, *_stored(rewritten)) if inner is Inner.INDUCTOR else ()


def parameters(inputs: Iterable[Input]) -> dict[int, torch.Tensor]:
    """Return the inputs that are parameters taken from attributes of Dynamo's graph, by index: the same tensors in every call.

    Buffers are left out: one may be a cache that another graph writes.
    """
    found = {index: entry.parameter() for index, entry in enumerate(inputs) if entry.parameter is not None}
    return {index: value for index, value in found.items() if value is not None}


@dataclass(frozen=True)
class InnerCompiler:
    """The inner compiler of one graph, with torch.compile's mode and options. Adds its seconds to the graph's report."""

    settings: Settings
    mode: str | None
    options: dict[str, Any] | None
    report: GraphReport

    def __call__(
        self, module: fx.GraphModule, inputs: Any, fake_mode: Any, key: str = "", replayed: bool = True,
        constant: Mapping[int, torch.Tensor] | None = None,
    ) -> Code:
        """Return ``module`` compiled for inputs like ``inputs``; ``constant``: inputs that are the same tensor in every call, by index."""
        started = time.perf_counter()
        try:
            with self.report.timing(Pass.COMPILE), constant_floats(module.graph, fake_mode):
                return compile_graph(
                    module, inputs, fake_mode, self.settings, mode=self.mode, options=self.options, plan=key, replayed=replayed,
                    constant=constant,
                )
        finally:
            self.report.compile_seconds += time.perf_counter() - started


class CompiledVariant(NamedTuple):
    """Code of one variant: ``key`` under which equal graphs share it (None: not shared), and its ``text`` for the report."""

    code: Code
    key: str | None
    text: str


class Variants:
    """The variants of one captured graph: rewritten, verified, compiled.

    ``known``: compiled code by fingerprint, shared by all graphs of a backend.
    ``key``: the policy as text. ``salt``: text that must be equal, beyond the graphs themselves, for two graphs to share code.
    """

    def __init__(
        self, captured: Captured, planned: Plan, effects: Effects, inner: InnerCompiler, known: MutableMapping[str, Code],
        key: str, salt: str,
    ) -> None:
        self.captured, self.planned, self.effects, self.inner = captured, planned, effects, inner
        self.known, self.key, self.salt = known, key, salt
        self.made: dict[Variant, Rewritten] = {}
        self._inputs: dict[Variant, tuple[tuple[Any, ...], dict[Any, str]]] = {}
        self._compiled: dict[Variant, tuple[Rewritten, Code]] = {}
        self._failed: dict[Variant, NotCompiled] = {}

    def __contains__(self, variant: Variant) -> bool:
        return variant in self._compiled

    def rewritten(self, variant: Variant) -> Rewritten:
        """Return the rewritten graph of a variant, made at the first call. Raises Unsupported as ``rewrite`` does."""
        if variant not in self.made:
            with self.inner.report.timing(Pass.REWRITE):
                self.made[variant] = rewrite(self.captured, self.planned, variant, self.effects)
        return self.made[variant]

    def inputs(self, variant: Variant) -> tuple[Any, ...]:
        """Return fake inputs of a variant's rewritten graph, in the order of its placeholders."""
        return self._described(variant)[0]

    def _described(self, variant: Variant) -> tuple[tuple[Any, ...], dict[Any, str]]:
        """Return (fake inputs, labels of the symbols that we added) of a variant."""
        if variant not in self._inputs:
            self._inputs[variant] = rewritten_inputs(self.captured, self.rewritten(variant))
        return self._inputs[variant]

    def printed(self, variant: Variant) -> fx.GraphModule:
        """Return a copy of a variant's rewritten graph with fake values on every node, for printing; the copy is not kept.

        The compiled graph cannot be printed: Inductor's passes change it.
        """
        with compile_lock:
            before = Beliefs.of(self.captured.fake_mode.shape_env)
            # The symbols of the compiled variant serve again: the shape environment must not grow with every page.
            fakes, symbols = self._described(variant)
            made = rewrite(self.captured, self.planned, variant, self.effects)
            try:
                with torch.no_grad():
                    FakeTensorProp(made.module, self.captured.fake_mode).propagate_dont_convert_inputs(*fakes)
            finally:
                forget_guards(self.captured, symbols)
                before.take_back(symbols)
        return made.module

    def compiled(self, variant: Variant) -> tuple[Rewritten, Code]:
        """Return a variant's rewritten graph and its code, compiled at the first request.

        Raises NotCompiled if that fails, and again at every later request.
        """
        if variant in self._failed:
            raise self._failed[variant]
        if variant in self._compiled:
            return self._compiled[variant]
        # A variant may be compiled during a call, when Dynamo does not hold its lock; tracing is not thread-safe.
        with compile_lock:
            try:
                code = self._compile(variant)
                self._compiled[variant] = self.rewritten(variant), code
            except NotCompiled as error:
                self._failed[variant] = error
                raise
        return self._compiled[variant]

    def _compile(self, variant: Variant) -> Code:
        try:
            return self._compiled_for_all_sizes(variant)
        except SizesFixed:
            # Inductor's cache may have returned code for one size whose guard happened to hold here: compile again without the cache.
            self.made.pop(variant)
            self._inputs.pop(variant)
            with uncached():
                return self._compiled_for_all_sizes(variant)

    def _compiled_for_all_sizes(self, variant: Variant) -> Code:
        before = Beliefs.of(self.captured.fake_mode.shape_env)
        try:
            made = self._code_of(variant, *self._described(variant))
        finally:
            # Verifying, choosing kernels and compiling may each add guards on the inputs, even if they fail.
            ours = {symbol for _, symbols in self._inputs.values() for symbol in symbols}
            forget_guards(self.captured, ours)
            if fixed := before.take_back(ours):
                raise SizesFixed(sizes=", ".join(f"{symbol} = {value}" for symbol, value in fixed.items()), variant=TITLES[variant])
        if made.key is not None:
            self.known[made.key] = made.code
        report = self.inner.report
        report.variants, report.kernels = (*report.variants, variant.value), (*report.kernels, made.text)
        return made.code

    def _code_of(self, variant: Variant, fakes: tuple[Any, ...], symbols: dict[Any, str]) -> CompiledVariant:
        """Return the code of a variant for inputs like ``fakes``: that of an equal graph if one was compiled, else newly compiled.

        ``symbols``: labels of the symbols that the rewrite added. Raises VerificationFailed under the setting ``verify``, and NotCompiled.
        """
        report, settings, started = self.inner.report, self.inner.settings, time.perf_counter()
        rewritten = self.rewritten(variant)
        mark_inputs(self.captured, rewritten, steady_inputs(self.captured, self.effects))
        if settings.verify:
            with report.timing(Pass.VERIFY):
                verify(rewritten, self.captured, fakes)
        trace_graph(report.index, f"after_{variant.value}", rewritten.module)
        # Described before compiling: Inductor's passes change the graph.
        replayed = gap(rewritten, self.captured) is None
        choice = gluon_choice(settings, self.inner.mode, self.inner.options, replayed) if settings.inner is Inner.INDUCTOR else None
        text = kernel_text(rewritten, len(self.planned.sites), settings.inner, choice)
        slow = slow_schemes(rewritten, settings.inner)
        for line in slow:
            warn_once(line)
        report.slow = tuple(dict.fromkeys((*report.slow, *slow)))
        key = f"{self.key}:{variant.value}"
        print_key = fingerprint(rewritten.module, fakes, symbols, f"{key}:{self.salt}")
        report.pass_seconds += time.perf_counter() - started
        code = self.known.get(print_key) if print_key is not None else None
        if code is None:
            constant = parameters(self.captured.inputs[index] for index in rewritten.kept)
            with compiling():
                code = self.inner(rewritten.module, fakes, self.captured.fake_mode, key, replayed=replayed, constant=constant)
        return CompiledVariant(code, print_key, text)
