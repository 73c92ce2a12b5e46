"""nf4: its levels are the source's, and its constant plane is in every store what the scheme says."""

from __future__ import annotations

import pytest
import torch
from constant_planes import stores_after_two_requests

from kvcompile.schemes.nf4 import LARGEST, LEVELS, Nf4
from kvcompile.types import Role, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)


def test_levels_are_those_of_the_source() -> None:
    assert [level / LARGEST for level in LEVELS] == pytest.approx(PUBLISHED, abs=2.0**-23)


def test_every_level_decodes_to_itself() -> None:
    x = torch.tensor(LEVELS).repeat(2).reshape(1, 1, 1, 32)
    assert torch.equal(Nf4().decode(Nf4().encode(x), SlotSpec(1, 32, torch.float32, Role.KEY)), x)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("policy", ["nf4", {"k": "nf4", "v": "int8"}, {"k": "kivi", "v": "nf4"}], ids=str)
def test_constant_plane_is_read_and_never_written(policy: object, kind: str) -> None:
    """Over two requests, beside a window too, whose append is given the constant plane."""
    for store in stores_after_two_requests(policy, kind, 0.15, "nf4"):
        at = next(index for index, plane in enumerate(store.spec.layout.planes) if plane.constant)
        assert torch.equal(store.planes[at], torch.tensor(LEVELS).expand_as(store.planes[at]))
        copied = store.select_rows(torch.tensor([1, 0]))
        assert torch.equal(copied.planes[at], store.planes[at])
        store.clear()
        assert torch.equal(store.planes[at], copied.planes[at])
