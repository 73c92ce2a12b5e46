"""Which buffers roll: as long as their mask's window at most, so that the newest token is written over the oldest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx

from kvcompile.passes.match.sites import Limit, LimitKind
from kvcompile.passes.match.slot_kinds import SlotKind
from kvcompile.passes.plan.plan import rolls

GRAPH = fx.Graph()
POSITION, OTHER = GRAPH.placeholder("position"), GRAPH.placeholder("other")
HI = Limit(LimitKind.NODE, 0, POSITION)


@pytest.mark.parametrize(("kind", "capacity", "lo", "found"), [
    (SlotKind.BUFFER, 64, Limit(LimitKind.NODE, -63, POSITION), 64), (SlotKind.BUFFER, 64, Limit(LimitKind.NODE, -90, POSITION), 64),
    (SlotKind.BUFFER, 64, Limit(LimitKind.NODE, -62, POSITION), None), (SlotKind.BUFFER, 64, Limit(LimitKind.NODE, -63, OTHER), None),
    (SlotKind.BUFFER, 64, Limit(LimitKind.OWN, -63), None), (SlotKind.BUFFER, 64, None, None),
    (SlotKind.UPDATED, 64, Limit(LimitKind.NODE, -63, POSITION), None), (SlotKind.CONCAT, 64, Limit(LimitKind.NODE, -63, POSITION), None),
], ids=str)
def test_a_buffer_rolls_that_its_window_fills(kind: SlotKind, capacity: int, lo: Limit | None, found: int | None) -> None:
    site: Any = SimpleNamespace(bounds=SimpleNamespace(hi=HI, lo=lo), key=SimpleNamespace(kind=kind, capacity=capacity))
    assert rolls(site) == found
