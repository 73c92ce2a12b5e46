"""Parts of torch replaced by faster ones that give the same, for the suite; ``pytest --unpatched`` runs the torch that users have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import joined_kernels
import sympy
import torch
import torch._inductor.config
from torch._dynamo import guards
from torch._inductor import sizevars
from torch._inductor import utils as inductor_utils
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._subclasses.fake_tensor import FakeTensorMode

TRACE = logging.getLogger("torch.__trace")
"""The log of every graph of every stage, which nobody reads here."""


def install() -> None:
    """Replace them, for the rest of the process."""
    # A full collection after every graph, and a flushed cache to measure how long its guards take: as much again as the suite's own.
    torch._dynamo.config.run_gc_after_compile = False
    guards.profile_guard_manager = lambda *measured: 0.0
    # A message with two stacks for every attribute that traced code sets, for a log that nobody reads: 2% of a test that compiles.
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"
    # A module's own attribute is found at once, a setting's value is looked for by a function: this one is asked for before every
    # instruction.
    vars(torch._dynamo.config)["verbose"] = torch._dynamo.config.verbose
    # Inductor simplifies an index expression for every stride it asks for: a third of its own time for a graph of squat. Expanding is
    # equal, gave the same expression for all of the 735 strides of that graph, and takes a tenth of the time.
    sizevars.sympy = SimpleNamespace(**{**vars(sympy), "simplify": sympy.expand})
    # Line tables of generated C++, for stacks that nobody reads: 40% of the compiler's time.
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        torch._inductor.config.aot_inductor.enable_line_tables = False
    # Pytest listens to loggers that do not propagate, so that torch prints every graph of every stage for its trace log.
    TRACE.addHandler = lambda handler: None  # type: ignore[method-assign]
    TRACE.handlers.clear()
    DtypePropagationOpsHandler.__init__ = _fill_once_a_set_of_rules(DtypePropagationOpsHandler.__init__)  # type: ignore[method-assign]
    FakeTensorMode._cached_dispatch_impl = _without_symbols(FakeTensorMode._cached_dispatch_impl)  # type: ignore[method-assign]
    joined_kernels.install()


def replaced() -> dict[str, bool]:
    """For each part of torch whether it is another one than torch's own, as it is now; settings that this torch lacks are left out."""
    functions: dict[str, Callable[..., Any]] = {
        "guards.profile_guard_manager": guards.profile_guard_manager, "DtypePropagationOpsHandler": DtypePropagationOpsHandler.__init__,
        "FakeTensorMode": FakeTensorMode._cached_dispatch_impl, "AsyncCompile.wait": AsyncCompile.wait,
        "AsyncCompile.cpp_pybinding": AsyncCompile.cpp_pybinding, "the trace log": TRACE.addHandler,
    }
    found = {name: not function.__module__.startswith(("torch.", "logging")) for name, function in functions.items()}
    found["sizevars.sympy"] = sizevars.sympy is not sympy
    found["dynamo.verbose"] = "verbose" in vars(torch._dynamo.config)
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    for config, name in (
        (dynamo, "run_gc_after_compile"), (dynamo, "side_effect_replay_policy"), (inductor, "aot_inductor.enable_line_tables"),
    ):
        if name in config._config:
            entry = config._config[name]
            found[name] = config.get_config_copy()[name] != entry.default
    return found


def _fill_once_a_set_of_rules(fill: Callable[[object], None]) -> Callable[[object], None]:
    """Return ``fill``, an ``__init__`` of Inductor's only table of result dtypes, such that it runs again only where rules were added.

    Inductor calls it for every operation that it generates code for: 1.5 s for the graphs of one layer of kivi on a CPU, of about 23.
    """
    known = 0

    def init(self: object) -> None:
        nonlocal known
        if known != len(inductor_utils.op_dtype_propagation_rules):
            fill(self)
            known = len(inductor_utils.op_dtype_propagation_rules)

    return init


def _symbolic(value: object) -> bool:
    """Whether an argument of an operator has a size that is a symbol."""
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides
    if isinstance(value, list | tuple):
        return any(map(_symbolic, value))
    return isinstance(value, torch.SymInt)


def _without_symbols(cached: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``cached``, fake tensors' dispatch through torch's cache of results, such that sizes that are symbols go past the cache.

    Symbols are those of one trace, so that most such entries are made and never read, and to read one takes as long as to compute it: 15%
    of a test that compiles. ``TORCH_FAKE_TENSOR_DISPATCH_CACHE=0`` is torch's switch for the whole of it.
    """

    def dispatch(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.shape_env is not None and any(map(_symbolic, args)):
            return self._dispatch_impl(func, types, args, kwargs)
        return cached(self, func, types, args, kwargs)

    return dispatch
