"""Attention plugins: operations that are there before any graph is rewritten, and one that another package brings."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

import kvcompile
from kvcompile import schemes
from kvcompile.lowering.attend_kernels import kernel_lines
from kvcompile.lowering.attention_plugins import AppendKernel, AttentionPlugin, append_of, own_append, plugin_of, plugins
from kvcompile.schemes import SCHEMES, Int8, Scheme
from kvcompile.types import Role


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_operation_of_every_scheme_is_defined(scheme: type[Scheme]) -> None:
    kvcompile.backend(scheme())
    assert isinstance(getattr(torch.ops.kvcompile, scheme.attention).default, torch._ops.OpOverload)
    assert (scheme.kernels is None) == (scheme.attention == Scheme.attention)
    assert (plugin_of(scheme.name) is None) == (scheme.kernels is None)


class Foreign(Int8):
    """A scheme of another package with an attention of its own."""

    name: ClassVar[str] = "foreign"
    attention: ClassVar[str] = "foreign_attend"
    kernels: ClassVar[str | None] = "foreign_room"
    append_kernel: ClassVar[str | None] = "foreign_room"


@pytest.fixture(scope="module")
def foreign() -> Iterator[AttentionPlugin]:
    """The plugin of a scheme that is registered after everything was imported."""
    library = torch.library.Library("kvcompile_foreign", "DEF")
    library.define("attend(Tensor q) -> Tensor")
    room = AttentionPlugin(
        torch.ops.kvcompile_foreign.attend.default, lambda q: q, lambda device, compiled: f"its kernel on {device}",
        AppendKernel(lambda slot: slot.x > 0, lambda slots, launcher=None: [slot.x for slot in slots]),
    )
    module: Any = types.ModuleType("foreign_room")
    module.PLUGIN, module.APPEND = room, room.append
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "foreign_room", module)
        patched.setitem(schemes.BY_NAME, "foreign", Foreign)
        yield room
    schemes.parse.cache_clear()


def test_a_scheme_that_is_registered_later_has_its_room(foreign: AttentionPlugin) -> None:
    assert foreign in plugins() and plugin_of("foreign") is foreign and plugin_of("int8") is None
    graph = fx.Graph()
    graph.output(graph.call_function(foreign.operation, (graph.placeholder("q"),)))
    assert kernel_lines(graph, "cpu", {}, sites=1) == "1 x attend (its kernel on cpu)"


def test_two_slots_share_a_launch_in_one_room_only(foreign: AttentionPlugin) -> None:
    own, other, plain = (types.SimpleNamespace(scheme=scheme, x=1) for scheme in ("foreign", "certified(key_or_value=key)", "int8"))
    assert own_append([own, own]) is foreign.append
    assert own_append([own, other]) is None and own_append([own, plain]) is None and own_append([plain]) is None


def test_a_scheme_brings_the_kernel_of_its_constant_planes(foreign: AttentionPlugin) -> None:
    assert append_of("foreign") is foreign.append
    assert {scheme.name for scheme in SCHEMES if append_of(scheme.name)} == {
        scheme.name for scheme in SCHEMES if scheme().for_role(Role.KEY).bins(64) or scheme().for_role(Role.KEY).static(64)
    } != set()
