"""Wrong options are refused before anything is compiled, each with its own error and a sentence.

The bad values follow from the type of an option's default, so a new scheme's options are tried too.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
import torch
from registry import each_scheme, slot

from kvcompile.errors import BadOption, HeadDimNotDivisible, SchemeError, UnknownOption, UnknownScheme
from kvcompile.passes.plan import policy_of
from kvcompile.schemes import SCHEMES, Scheme, make, parse
from kvcompile.types import Role

OPTIONS = [(cls, field) for cls in SCHEMES for field in dataclasses.fields(cls)]
each_option = pytest.mark.parametrize(("cls", "field"), OPTIONS, ids=lambda item: item.name)


def bad_values(default: Any) -> list[Any]:
    """Values that no option with such a default may have: objects and texts."""
    if isinstance(default, enum.Enum):
        return ["coarse", "", 3, None]
    if isinstance(default, torch.dtype):
        return [torch.int64, torch.complex64, "float99", "", 16, None]
    if isinstance(default, bool):
        return ["maybe", 3, None]
    if isinstance(default, float):
        return [-1.0, -1e-9, float("nan"), float("inf"), 1e30, "many", "nan", "", None, True]
    if isinstance(default, int):
        # Those with a power of two as their default take no odd number.
        return [0, -1, -32, 2.5, "many", "", None, True, *([7] if default & (default - 1) == 0 else [])]
    return ["", None]


@each_option
def test_bad_values_are_refused(cls: type[Scheme], field: dataclasses.Field[Any]) -> None:
    # Of slots of a scratch there may be none.
    for value in bad_values(field.default)[field.name == "scratch" :]:
        with pytest.raises(BadOption) as caught:
            make(cls.name, **{field.name: value})
        text = str(caught.value)
        assert cls.name in text and field.name in text and "expects" in text and "found" in text
        assert caught.value.facts["todo"], "no advice"
        with pytest.raises((BadOption, TypeError)):
            cls(**{field.name: value})


@each_option
def test_options_read_from_text(cls: type[Scheme], field: dataclasses.Field[Any]) -> None:
    default = getattr(field.default, "value", field.default)
    text = str(default).removeprefix("torch.")
    assert make(cls.name, **{field.name: text}) == cls()
    assert parse(f"{cls.name}( {field.name} = {text} )") == cls()


@each_scheme
def test_unknown_option(cls: type[Scheme]) -> None:
    with pytest.raises(UnknownOption, match="'no_such_option'") as caught:
        make(cls.name, no_such_option=1)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(cls))
    with pytest.raises(UnknownOption):
        parse(f"{cls.name}(no_such_option=1)")


@each_scheme
def test_near_miss_of_a_name_is_suggested(cls: type[Scheme]) -> None:
    with pytest.raises(UnknownScheme, match=f"did you mean '{cls.name}'"):
        make(cls.name[:-1] + "x" + cls.name[-1])


@pytest.mark.parametrize("ending", ["(", ")", "(group", "(=)", "(group=32", "(group=32))", "()()", "(group=32)x"])
@each_scheme
def test_garbled_spelling(cls: type[Scheme], ending: str) -> None:
    with pytest.raises(SchemeError):
        parse(cls.name + ending)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownScheme) as caught:
        make("zzzzzz")
    assert all(cls.name in str(caught.value) for cls in SCHEMES)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("found", [None, 4, 2.5, [], ["int8"], {}, {"k": "int8"}, object()], ids=lambda found: type(found).__name__)
def test_what_is_no_policy(found: object) -> None:
    if isinstance(found, dict) and found:
        # A glob named "k" is a policy, if an odd one.
        assert policy_of(found).of("v") is None
        return
    with pytest.raises(SchemeError):
        policy_of(found)


@each_scheme
def test_prime_head_dim_is_held_or_refused(cls: type[Scheme]) -> None:
    for scheme in (variant.of(Role.KEY) for variant in cls.variants()):
        try:
            scheme.check(slot(head_dim=67))
        except HeadDimNotDivisible as error:
            assert "67" in str(error) and cls.name in str(error) and "divisors" in str(error)
        else:
            planes = scheme.encode(torch.ones(1, 1, scheme.block, 67))
            assert scheme.decode(planes, slot(head_dim=67)).shape == (1, 1, scheme.block, 67)
