"""Every law of ``kvcompile.testing`` on every setting of every scheme that it speaks of.

No scheme is named here. A scheme joins through the registry and says by its own properties what does not apply to it.
"""

from __future__ import annotations

import pytest
from add_a_scheme import Fp4
from registry import CHOSEN, SCHEMES, VARIANTS

from kvcompile.schemes import Scheme
from kvcompile.testing.laws import Law
from kvcompile.testing.suite import COMPILED, LAWS

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    pytest.param(law, made, id=f"{law.name}-{made.spec()}")
    for law in LAWS if law not in COMPILED for scheme in SCHEMES for made in law.settings(scheme)
]


@pytest.mark.parametrize(("law", "scheme"), CASES)
def test_law(law: Law, scheme: Scheme) -> None:
    law(scheme)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("scheme", dict.fromkeys((Fp4, *CHOSEN)), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("law", sorted(COMPILED, key=str), ids=str)
def test_law_of_compiled_code(law: Law, scheme: type[Scheme]) -> None:
    """Of schemes from outside; those of the package go through Inductor with modules (``test_every_scheme``) and in tests of their own."""
    law(scheme())


def test_spellings_are_unique() -> None:
    assert len({scheme.spec() for scheme in VARIANTS}) == len(VARIANTS)
