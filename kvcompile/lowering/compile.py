"""Compile a rewritten graph with Inductor, AOT eager or nothing at all.

``append`` nodes are replaced by a call of their eager body, which AOTAutograd traces through: encoding is
then ordinary pointwise and reduction code that Inductor fuses with RoPE and the projections that make the
new tokens. In graphs for CUDA they may be kernels of our own instead (``appends``). ``attend`` nodes stay,
and are lowered by our templates.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kvcompile.errors import BadSetting, KvcompileError, NotCompiled, OwnFault
from kvcompile.lowering.append import appends
from kvcompile.lowering.blocks import attend_blocks_traced
from kvcompile.lowering.cache_key import CacheKey, sources_hash
from kvcompile.lowering.certificate import report_op as report_site
from kvcompile.lowering.damaged import damaged_entry, rebuilding
from kvcompile.lowering.frozen import Frozen, as_attributes
from kvcompile.lowering.gluon.eligibility import GluonSettings, choosing
from kvcompile.lowering.host.inductor_entry import compile_by_inductor, config, exact_division, list_mode_options, written_modules
from kvcompile.lowering.host.torch_api import (
    BackendCompilerFailed,
    FakeTensorMode,
    OpOverload,
    TorchDynamoException,
    TracingContext,
    lookup_backend,
    tracing,
)
from kvcompile.lowering.layer_regions import fold_into_regions
from kvcompile.lowering.ops import operations as ops
from kvcompile.settings import Inner, Settings

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within the context, turn a compiler's error into NotCompiled, or into OwnFault if its cause is in this package.

    Errors of kvcompile, and errors by which Dynamo controls its own flow, pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, KvcompileError) or (isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)):
            raise
        first = first_error(error)
        said = f"{type(first).__name__}: {next(iter(str(first).splitlines()), '')}"
        if (where := own_line(first)) is not None:
            raise OwnFault(error=said, where=where) from error
        raise NotCompiled(error=said) from error


PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
"""Folder of this package, with a trailing separator."""
COMPILERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_inductor", "_functorch", "_dynamo", "triton"))
"""Folders of compilers' code. The rest of torch is called by compilers and by us."""
CALLERS = {"compiling", "_built", "compile_by_inductor"}
"""Names of this package's functions that call a compiler."""


def first_error(error: BaseException) -> BaseException:
    """Return the innermost cause of a compiler's error."""
    while (before := error.__cause__ or getattr(error, "inner_exception", None)) is not None and before.__traceback__ is not None:
        error = before
    return error


def own_line(error: BaseException) -> str | None:
    """Return the line of this package whose call failed, as ``lowering/compile.py:12``; None if a compiler's frame is further inside."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = frame.filename.startswith(PACKAGE)
        if any(folder in frame.filename for folder in COMPILERS) or (ours and frame.name in CALLERS):
            return None
        if ours:
            return f"{frame.filename.removeprefix(PACKAGE)}:{frame.lineno}"
    return None


BODIES: dict[Any, Callable[..., Any]] = {
    ops.append: ops.append_body, ops.append_window: ops.append_window_body, ops.undo_rope: ops.undo_rope_body, ops.unroll: ops.unroll_body,
    ops.gather: ops.gather_body, ops.attend_blocks: ops.attend_blocks_body, ops.read_back: ops.read_back_body,
    ops.first_visible: ops.first_visible_body, ops.keep_first: ops.keep_first_body, ops.rotate_channels: ops.rotate_channels_body,
    report_site.report_site: report_site.report_site_traced,
}


ON_CUDA: dict[Any, Callable[..., Any]] = {
    **{target: body for target, body in BODIES.items() if target is not ops.first_visible},
    ops.append: appends.append_traced, ops.append_window: appends.append_window_traced, ops.attend_blocks: attend_blocks_traced,
}
"""Bodies on CUDA, some of which may use kernels. ``first_visible`` stays an operation, so that Inductor fuses nothing with it."""
WRITERS = frozenset({
    appends.append_traced, appends.append_window_traced, appends.append_both, appends.append_window_both, report_site.report_site_traced,
})
"""Bodies that trace to operations with mutated operands."""


def inline_append(module: fx.GraphModule, cuda: bool = False) -> fx.GraphModule:
    """Return a copy of the graph in which operations with a body become calls of it; ``cuda``: of its replacement on CUDA."""
    bodies = ON_CUDA if cuda else BODIES
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, env)
    graph.output(result)
    for old, new in env.items():
        new.meta = dict(old.meta)
        for name in ("_dynamo_source",):
            if hasattr(old, name):
                setattr(new, name, getattr(old, name))
    if cuda:
        appends.pair(graph)
    for new in graph.nodes:
        if new.op == "call_function" and new.target in bodies:
            new.target = bodies[new.target]
        if new.op == "placeholder":
            # With "val", Inductor's C++ wrapper takes the graph for an exported one, whose inputs must all be tensors.
            new.meta.pop("val", None)
    return fx.GraphModule(module, graph)


CACHEABLE = "unsafe_marked_cacheable_functions"
"""Inductor's option that lists functions that a graph may call and still be cached on disk, with a key for each."""


def own_functions(graph: fx.Graph) -> tuple[str, ...]:
    """Return the sorted names of this package's functions that a graph calls, which AOTAutograd traces through and caches.

    Sorted, since they are part of the key on disk, which must be equal in every process.
    """
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    return tuple(sorted(
        f"{target.__module__}.{target.__name__}" for target in targets
        if not isinstance(target, OpOverload) and str(getattr(target, "__module__", "")).startswith("kvcompile.")
    ))


def inductor_patches(
    settings: Settings, mode: str | None, options: dict[str, Any] | None, plan: str, replayed: bool = True
) -> dict[str, Any]:
    """Return Inductor's configuration for this compilation: mode, options and its cache's salt. ``replayed``: False turns CUDA graphs off.

    Raises BadSetting for an unknown mode.
    """
    patches: dict[str, Any] = {}
    mode = mode or settings.mode
    if mode and mode != "default":
        known = list_mode_options()
        if mode not in known:
            raise BadSetting(setting="mode", expected=f"one of {sorted(known)}", found=mode)
        patches.update(known[mode])
    for source in (settings.options, options or {}):
        patches.update({name.replace("-", "_"): value for name, value in source.items()})
    if not replayed:
        patches["triton.cudagraphs"] = False
    # Pre-grad passes look for calls of torch, and the graph is ATen.
    patches.setdefault("use_pre_grad_passes", bool(patches.get("pre_grad_custom_pass", config.pre_grad_custom_pass)))
    # Triton's own division rounds otherwise than eager code.
    for name, value in exact_division().items():
        patches.setdefault(name, value)
    # Torch 2.11 reads a buffer by padded strides that it then allocates without, where the stride of a head is no multiple of 128
    # bytes: an append of 37 tokens of 80 channels encoded other tokens' channels. Not seen with 2.13, where only a CPU was tried.
    patches.setdefault("comprehensive_padding", False)
    mine = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    patches["post_grad_custom_pre_pass"] = CacheKey(f"{plan}:{settings.gluon.value}", mine)
    return patches


def gluon_choice(settings: Settings, mode: str | None, options: dict[str, Any] | None, replayed: bool = True) -> GluonSettings:
    """Return the setting for the Gluon kernel together with whether the compiled steps are replayed as CUDA graphs.

    ``mode``, ``options``: those of ``torch.compile``; ``replayed``: False turns CUDA graphs off. Raises BadSetting for an unknown mode.
    """
    patches = inductor_patches(settings, mode, options, "", replayed)
    return GluonSettings(settings.gluon, bool(patches.get("triton.cudagraphs", config.triton.cudagraphs)))


def freezes(settings: Settings, mode: str | None, options: dict[str, Any] | None) -> bool:
    """Return whether Inductor would freeze attributes of a graph as constants: its ``freezing`` is on, and gradients are off.

    Raises BadSetting for an unknown mode.
    """
    if settings.inner is not Inner.INDUCTOR or torch.is_grad_enabled():
        return False
    return bool(inductor_patches(settings, mode, options, "").get("freezing", config.freezing))


@contextlib.contextmanager
def _context(fake_mode: FakeTensorMode) -> Any:
    """Enter Dynamo's tracing context if there is one, otherwise a new one."""
    if TracingContext.try_get() is not None:
        yield
        return
    with tracing(TracingContext(fake_mode)):
        yield


def compile_graph(
    module: fx.GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode, settings: Settings, *,
    mode: str | None = None, options: dict[str, Any] | None = None, plan: str = "", replayed: bool = True,
    constant: Mapping[int, torch.Tensor] | None = None,
) -> Compiled:
    """Return ``module`` as a callable on real arguments like ``fakes``, compiled by the inner compiler, whose errors pass through.

    ``constant``: inputs, by index, that are this tensor in every call; they become attributes if Inductor freezes (``freezes``). ``mode``,
    ``options``: for Inductor; ``plan``: a text that the keys on disk include. ``replayed``: False turns CUDA graphs off. Logs a warning if
    equal layers could not be compiled as one region.
    """
    if settings.inner is Inner.EAGER:
        return module.forward
    if constant and freezes(settings, mode, options):
        rest = [fake for index, fake in enumerate(fakes) if index not in constant]
        frozen = compile_graph(
            as_attributes(module, constant), rest, fake_mode, settings, mode=mode, options=options, plan=plan, replayed=replayed
        )
        return Frozen(frozen, dict(constant))
    def build(fold_layers: bool) -> Compiled:
        return _built(module, fakes, fake_mode, replace(settings, fold=fold_layers), mode, options, plan, replayed)

    try:
        return rebuilding(functools.partial(build, settings.fold))  # type: ignore[no-any-return]
    except _NotAsRegions as failed:
        log.warning("%d equal layers could not be compiled as one region, and are compiled one by one", failed.layers, exc_info=True)
    return rebuilding(functools.partial(build, False))  # type: ignore[no-any-return]


class _NotAsRegions(Exception):  # noqa: N818 - says that a graph is to be compiled otherwise; never leaves this file
    """The inner compiler failed on a graph whose equal layers were folded into regions."""

    def __init__(self, layers: int) -> None:
        self.layers = layers


def _built(
    module: fx.GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode, settings: Settings, mode: str | None,
    options: dict[str, Any] | None, plan: str, replayed: bool,
) -> Compiled:
    """Return the code of a copy of ``module``, compiled with equal layers as regions if ``settings.fold``.

    Raises _NotAsRegions if it has regions and cannot be compiled; passes on errors that name a damaged cache entry.
    """
    cuda = settings.inner is Inner.INDUCTOR and any(isinstance(item, torch.Tensor) and item.device.type == "cuda" for item in fakes)
    inlined = inline_append(module, cuda)
    inlined.meta.update(module.meta)
    for name in ("_param_name_to_source",):
        if hasattr(module, name):
            setattr(inlined, name, getattr(module, name))
    # Before folding: regions hide the functions that they call.
    functions = own_functions(inlined.graph)
    folded = settings.fold and fold_into_regions(inlined, fakes, WRITERS)
    try:
        with _context(fake_mode):
            if settings.inner is Inner.AOT_EAGER:
                return lookup_backend("aot_eager")(inlined, list(fakes))
            # Imported late: it loads Inductor's lowerings and ours, which other inner compilers do not need.
            from kvcompile.lowering import inductor

            inductor.install()
            patches = inductor_patches(settings, mode, options, plan, replayed)
            marked = patches.get(CACHEABLE, getattr(config, CACHEABLE))
            patches[CACHEABLE] = marked | dict.fromkeys(functions, sources_hash())
            with choosing(gluon_choice(settings, mode, options, replayed)):
                return compile_by_inductor(inlined, fakes, patches)
    except Exception as error:
        if not folded or damaged_entry(error) is not None:
            raise
        raise _NotAsRegions(folded) from error


def emitted_modules(
    module: fx.GraphModule, fakes: Sequence[Any], fake_mode: FakeTensorMode, options: dict[str, Any] | None = None
) -> list[str]:
    """Return the source of every output module that Inductor makes of a graph with ``options``, without its caches."""
    settings = Settings(Inner.INDUCTOR, options={"force_disable_caches": True, **(options or {})})

    def build() -> None:
        with torch.no_grad():
            compile_graph(module, fakes, fake_mode, settings)

    return written_modules(build)
