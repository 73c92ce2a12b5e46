"""A search for values that break the announced bound, beside those that the laws of ``kvcompile.testing`` try."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from registry import each_bounded

from kvcompile.schemes import Scheme
from kvcompile.testing import numerics
from kvcompile.testing.samples import fitting
from kvcompile.types import SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

steady = settings(max_examples=40, deadline=None, derandomize=True, database=None)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
"""Everything float32 has: zeros of both signs, denormals, the largest numbers."""


@st.composite
def magnitudes(draw: st.DrawFn, width: int) -> np.ndarray:
    """A token of one magnitude with an outlier of another, both from the whole range of float32."""
    base, outlier = draw(st.integers(-149, 126)), draw(st.integers(-149, 126))
    x = draw(arrays.arrays(np.float32, width, elements=st.floats(-1, 1, width=32))) * np.float32(2.0**base)
    x[draw(st.integers(0, width - 1))] = np.float32(2.0**outlier) * np.float32(draw(st.floats(1, 1.984375, width=32)))
    return x


@st.composite
def ties(draw: st.DrawFn, width: int) -> np.ndarray:
    """Values halfway between neighboring levels of a scale that is a power of two."""
    qmax, power = draw(st.sampled_from([7, 127, 448])), draw(st.integers(-20, 20))
    halves = draw(arrays.arrays(np.int32, width, elements=st.integers(-2 * qmax, 2 * qmax)))
    x = halves.astype(np.float32) / 2
    x[0] = qmax
    return x * np.float32(2.0**power)


def within(scheme: Scheme, spec: SlotSpec, row: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    """Hold one token to the law; a value that the dtype has not is none."""
    x = torch.from_numpy(row).reshape(1, 1, 1, -1).to(dtype)
    if torch.isfinite(x).all():
        numerics.within(scheme, x, spec)


@each_bounded
def test_any_floats(scheme: Scheme) -> None:
    spec = fitting(scheme, heads=1)

    @steady
    @given(arrays.arrays(np.float32, spec.head_dim, elements=finite))
    def law(row: np.ndarray) -> None:
        within(scheme, spec, row)

    law()


@each_bounded
def test_one_outlier_in_any_magnitude(scheme: Scheme) -> None:
    spec = fitting(scheme, heads=1)

    @steady
    @given(magnitudes(spec.head_dim), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def law(row: np.ndarray, dtype: torch.dtype) -> None:
        within(scheme, SlotSpec(1, spec.head_dim, dtype, spec.role), row, dtype)

    law()


@each_bounded
def test_ties(scheme: Scheme) -> None:
    spec = fitting(scheme, heads=1)

    @steady
    @given(ties(spec.head_dim))
    def law(row: np.ndarray) -> None:
        within(scheme, spec, row)

    law()

