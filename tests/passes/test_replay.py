"""Which rewritten graphs may be recorded as CUDA graphs, and why others may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcompile.passes.match.slot_kinds import SlotKind
from kvcompile.passes.rewrite.replay import gap
from kvcompile.passes.rewrite.rewritten import Variant


def reason(*kinds: SlotKind, sizes: tuple[str, ...] = ("s0",), variant: Variant = Variant.PAST) -> str | None:
    """Why a graph over caches of these kinds is not recorded."""
    bindings = [SimpleNamespace(plan=SimpleNamespace(slot=SimpleNamespace(kind=kind))) for kind in kinds]
    made: Any = SimpleNamespace(variant=variant, bindings=bindings, sizes=sizes, kept=())
    return gap(made, SimpleNamespace(fakes=()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [(SlotKind.CONCAT,), (SlotKind.CONCAT, SlotKind.BUFFER), (SlotKind.BUFFER, SlotKind.CONCAT)], ids=str)
def test_one_growing_cache_is_enough_to_record_anew_at_every_step(kinds: tuple[SlotKind, ...]) -> None:
    found = reason(*kinds)
    assert found is not None and "recorded anew at every step" in found
    assert reason(*kinds, sizes=()) is None, "its length is in its planes"


def test_buffers_are_recorded_once_they_are_filled() -> None:
    assert reason(SlotKind.BUFFER) is None
    for found in (reason(SlotKind.BUFFER, variant=Variant.FRESH), reason(SlotKind.BUFFER, SlotKind.CREATED_CONCAT)):
        assert found is not None and "fills empty caches" in found
