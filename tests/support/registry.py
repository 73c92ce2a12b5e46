"""The registry as test parameters: every scheme joins every test of all schemes by being registered, the example's too.

``pytest --scheme=file.py`` adds the schemes of a file; it and ``--module`` are in the environment, for processes that tests start too.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from add_a_scheme import Fp4

from kvcompile import schemes
from kvcompile.schemes import Scheme
from kvcompile.testing.files import schemes_of
from kvcompile.testing.laws import bounded, settings_of
from kvcompile.testing.samples import DTYPES

CHOSEN = tuple(scheme for text in os.environ.get("KVCOMPILE_TRIED_SCHEMES", "").splitlines() for scheme in schemes_of(text))
"""The schemes that ``--scheme`` names; none where it is not given."""

SCHEMES = tuple(dict.fromkeys((*schemes.SCHEMES, Fp4, *CHOSEN)))
"""Those of the package, one that is registered from outside, and those of ``--scheme``; not what a test registers for itself."""

VARIANTS = tuple(dict.fromkeys(made for scheme in SCHEMES for made in settings_of(scheme)))
"""Every setting of every scheme, as keys and as values where those differ."""

each_scheme = pytest.mark.parametrize("cls", SCHEMES, ids=lambda cls: cls.name)
each_variant = pytest.mark.parametrize("scheme", VARIANTS, ids=lambda scheme: scheme.spec())
BOUNDED = tuple(scheme for scheme in VARIANTS if bounded(scheme))
"""Those that announce a bound on their error; what holds of the others is their own tests' business."""

each_bounded = pytest.mark.parametrize("scheme", BOUNDED, ids=lambda scheme: scheme.spec())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

PLAIN = tuple(scheme for scheme in SCHEMES if scheme.attention == Scheme.attention)
"""Those whose attention is ``attend``, which its kernels serve; others' attention is an operation of their own, with tests of its own."""


MODULE = os.environ.get("KVCOMPILE_TRIED_MODULE", "")
"""The module of ``e2e_models`` that ``--module`` names."""


def concerns(value: Any) -> bool:
    """Whether a test's parameter is one of the chosen schemes, its class, a setting or a text of one, or the chosen module."""
    if isinstance(value, str):
        return value.partition("(")[0] in {scheme.name for scheme in CHOSEN}
    if isinstance(value, tuple):
        return any(map(concerns, value))
    return value in CHOSEN if isinstance(value, type) else isinstance(value, CHOSEN) or (bool(MODULE) and str(value) == MODULE)
