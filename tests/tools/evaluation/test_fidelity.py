"""Errors of attention's outputs against values worked out by hand, and hooks that leave the model as it was."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from kvcompile.tools.evaluation.fidelity import decibels, errors, first_tensor, heard, modules


def test_errors_by_hand() -> None:
    """(1, 0) beside (1, 1), and (0, 2) beside (0, 2): mean squares 1/4 of 3/2, cosines 1/sqrt(2) and 1."""
    exact = {"a": torch.tensor([[[1.0, 1.0]], [[0.0, 2.0]]])}
    found = {"a": torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])}
    (row,) = errors(found, exact, 7)
    assert (row.length, row.path) == (7, "a") and row.mse == pytest.approx(1 / 4)
    assert row.cosine == pytest.approx((1 / math.sqrt(2) + 1) / 2)
    assert row.snr == pytest.approx(10 * math.log10(1.5 / 0.25))
    assert errors(exact, exact, 7)[0].snr == 300.0 == decibels(1.0, 0.0)


class Pair(nn.Module):
    """A module whose result is a tuple, as attention modules' are."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * x, None


def test_outputs_are_heard_while_asked_and_hooks_are_removed() -> None:
    model = nn.Sequential(nn.Identity())
    model.add_module("attention", Pair())
    assert modules(model, ["attention", "attention", "nowhere", ""]) == ["attention"]
    x = torch.ones(1, 2, 3)
    with contextlib.suppress(RuntimeError), heard(model, ["attention"]) as found:
        model(x)
        assert torch.equal(found["attention"][0], 2 * x)
        raise RuntimeError
    model(x)
    assert len(found["attention"]) == 1
    assert first_tensor((None, x)) is None and first_tensor([]) is None and first_tensor(x) is x
