"""Modules of ``e2e_models`` under the registered schemes, and what Inductor makes of them.

All pairs would take an hour. Here each module has one scheme, by turns, and every second scheme a module that Inductor compiles;
``pytest --module=NAME`` runs one module under every scheme, and with Inductor. ``--scheme`` runs every module under a scheme.
"""

from __future__ import annotations

import pytest
import torch
from e2e_models import CASES, Case, inputs
from registry import CHOSEN, MODULE, PLAIN, SCHEMES
from torch._dynamo.exc import BackendCompilerFailed

import kvcompile
from kvcompile.errors import SchemeError, SiteRefused, Unsupported
from kvcompile.schemes import Scheme
from kvcompile.testing.samples import normal, round_trip
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

MODULES = [case for case in CASES if not case.refused]
CHANNELS, CHUNKS = 32, (7, 1, 1, 4)


Pair = tuple[Case, type[Scheme]]


def by_turns(modules: list[Case], schemes: tuple[type[Scheme], ...], count: int) -> list[Pair]:
    """Pair modules and schemes, the next of each for every pair."""
    return [(modules[at % len(modules)], schemes[at % len(schemes)]) for at in range(count)]


def parameters(found: list[Pair]) -> list[object]:
    """Pairs as parameters of a test, each once."""
    named = {f"{case.name}-{kind.name}": (case, kind) for case, kind in found}
    return [pytest.param(*pair, id=name) for name, pair in named.items()]


ALL = [(case, kind) for case in MODULES for kind in SCHEMES if case.name == MODULE or kind in CHOSEN]
"""Every pair of the module and the schemes that were asked for."""
EAGER = by_turns(MODULES, SCHEMES, len(MODULES)) + ALL
INDUCTOR = by_turns(MODULES[::4], PLAIN[::2], len(PLAIN[::2])) + [(case, kind) for case, kind in ALL if case.name == MODULE]


def rounding(scheme: Scheme) -> float:
    """What encoding changes in values, as a part of their size; 0 where a window holds all tokens."""
    if max(scheme.window, scheme.sinks) >= sum(CHUNKS):
        return 0.0
    found = []
    for role in Role:
        half, spec = scheme.for_role(role), SlotSpec(2, CHANNELS, torch.float32, role)
        x = normal(1, 2, 64, CHANNELS)
        found.append(float((round_trip(half, x, spec) - x).norm() / x.norm()))
    return max(found)


def results(case: Case, scheme: Scheme, inner: str | None) -> list[torch.Tensor] | None:
    """Return what a module gives over a cache of a scheme, or uncompiled; None where the scheme refuses its cache with its own error."""
    module = case.make(dim=case.sizes.get("dim", CHANNELS))
    given, call = inputs(module, CHUNKS), module
    if inner is not None:
        call = torch.compile(module, backend=kvcompile.backend(scheme, inner=inner, strict=True), fullgraph=True)
    try:
        with torch.no_grad():
            return case.drive(module, call, given)
    except BackendCompilerFailed as failed:
        # A scheme may refuse a head dim; one whose tokens depend on one another cannot hold every form of cache, and says so.
        said, halves = str(failed.inner_exception), [scheme.for_role(role) for role in Role]
        assert isinstance(failed.inner_exception, (SchemeError, SiteRefused)) and scheme.name in said
        if "needs a head dim" not in said and all(half.position_independent and not half.in_order for half in halves):
            raise
    except Unsupported:
        # So may a call, before anything is written, where the attention sees tokens that such a scheme does not hold yet.
        if not any(scheme.for_role(role).in_order for role in Role):
            raise
    return None


@pytest.mark.parametrize(("case", "kind"), parameters(EAGER))
def test_a_module_is_near_itself_under_a_scheme(case: Case, kind: type[Scheme]) -> None:
    found, plain = results(case, kind(), "eager"), results(case, kind(), None)
    assert plain is not None
    if found is None:
        pytest.skip("the scheme cannot hold this cache, and says so")
    size = max(float(item.abs().max()) for item in plain)
    allowed = (4 * rounding(kind()) + 1e-5) * size
    assert max(float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)) <= allowed


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), parameters(INDUCTOR))
def test_inductor_gives_what_eager_gives(case: Case, kind: type[Scheme]) -> None:
    found, eager = (results(case, kind(), inner) for inner in ("inductor", "eager"))
    if found is None or eager is None:
        assert found is eager
        pytest.skip("the scheme cannot hold this cache, and says so")
    for mine, other in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=0)
