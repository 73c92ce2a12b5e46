"""The suite runs a torch with faster parts, ``pytest --unpatched`` the one that users have: each is what it says."""

from __future__ import annotations

import faster_torch
import pytest


def test_nothing_of_torch_is_replaced(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--unpatched"):
        pytest.skip("torch has faster parts in this run: make slow runs this test with --unpatched")
    assert not [name for name, other in faster_torch.replaced().items() if other]


def test_every_replaced_part_is_seen(request: pytest.FixtureRequest) -> None:
    """A part that ``replaced`` could not tell from torch's own would be missed by the test above."""
    if request.config.getoption("--unpatched"):
        pytest.skip("torch is as users have it in this run")
    assert all(faster_torch.replaced().values()), faster_torch.replaced()
