"""Wrong options are refused before anything is compiled, each with its own error and a sentence.

The bad values follow from the type of an option's default, so a new scheme's options are tried too.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar

import pytest
import torch
from registry import SCHEMES, each_scheme

from kvcompile import schemes
from kvcompile.errors import BadOption, HeadDimNotDivisible, SchemeError, UnknownOption, UnknownScheme
from kvcompile.passes.plan.policy import policy_of
from kvcompile.schemes import Int4, Kivi, Planes, Scheme, make, parse
from kvcompile.testing.samples import slot
from kvcompile.types import Role

OPTIONS = [(cls, field) for cls in SCHEMES for field in cls.options()]
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


GOOD = {
    "scratch": (0,), "value_scratch": (0,), "order": (0,), "sinks": (0, 7),
    "protect_first": (0, 7), "protect_last": (0, 7), "interval": (7,), "threshold": (0, 7),
    "layer_weights": ("",), "window": (0, 7),
}
"""Values that an option of this name may have, though others with such a default may not."""


def good_values(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Those of an option; a window that a scheme always has is whole blocks."""
    return () if field.name == "window" and field.default else GOOD.get(field.name, ())


@each_option
def test_bad_values_are_refused(cls: type[Scheme], field: dataclasses.Field[Any]) -> None:
    good = [(type(value), value) for value in good_values(field)]
    # None is the default of an optional one.
    for value in ["", "x", 1.5] if "optional" in field.metadata else bad_values(field.default):
        if (type(value), value) in good:
            assert getattr(make(cls.name, **{field.name: value}), field.name) == value
            continue
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
def test_a_former_name_of_an_option_is_read(cls: type[Scheme]) -> None:
    names = {field.name: str(getattr(field.default, "value", field.default)) for field in cls.options()}
    for former, name in cls.renamed.items():
        assert former not in names and parse(f"{cls.name}({former}={names[name]})") == parse(f"{cls.name}({name}={names[name]})")
    assert cls.renamed or cls.name not in {"certified", "smartkv"}


@each_scheme
def test_unknown_option(cls: type[Scheme]) -> None:
    with pytest.raises(UnknownOption, match="'no_such_option'") as caught:
        make(cls.name, no_such_option=1)
    assert all(field.name in str(caught.value) for field in cls.options())
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
    with pytest.raises(SchemeError):
        policy_of(found)


@pytest.mark.parametrize(
    ("head_dim", "group", "bits"),
    [
        (16, 16, 5.0), (24, 24, 4 + 16 / 24), (32, 32, 4.5), (40, 8, 6.0), (64, 32, 4.5), (72, 8, 6.0), (80, 16, 5.0), (96, 32, 4.5),
        (128, 32, 4.5),
    ],
)
def test_the_default_group_is_the_largest_that_fits(head_dim: int, group: int, bits: float) -> None:
    spec, scheme = slot(head_dim=head_dim), make("int4")
    scheme.check(spec)
    assert scheme.format(spec).group == group and scheme.bits_per_value(spec) == pytest.approx(bits)
    x = torch.randn(1, 2, 5, head_dim)
    planes = scheme.encode(x)
    widths = [head_dim // 2, head_dim // group]
    assert [plane.shape[-1] for plane in planes] == [plane.width for plane in scheme.layout(spec).planes] == widths
    # Each group has a scale of its own.
    loud = x.clone()
    loud[..., :group] *= 1e3
    assert torch.equal(scheme.decode(scheme.encode(loud), spec)[..., group:], scheme.decode(planes, spec)[..., group:])
    assert ((scheme.decode(planes, spec) - x).abs() <= x.abs().amax() / 13).all()


@pytest.mark.parametrize(("text", "head_dim"), [("int4(group=64)", 80), ("int4(group=16)", 72), ("int4", 36), ("int4", 33)])
def test_a_group_that_does_not_fit_is_refused(text: str, head_dim: int) -> None:
    with pytest.raises(HeadDimNotDivisible, match=f"found head dim {head_dim}"):
        parse(text).check(slot(head_dim=head_dim))


@dataclasses.dataclass(frozen=True)
class Offset(Int4):
    """Four bits whose codes are stored otherwise than int4's."""

    name: ClassVar[str] = "offset"

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        return super().unpack(words ^ 0x55, part)

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return super().pack(scaled) ^ 0x55


@dataclasses.dataclass(frozen=True)
class Coarse(Kivi):
    """Two bits of which one is used."""

    name: ClassVar[str] = "coarse"

    def quantize(self, x_BKSD: torch.Tensor) -> Planes:
        codes, scale, zero = super().quantize(x_BKSD)
        return codes & 2, scale, zero


@pytest.mark.parametrize("derived", [Offset(), Coarse().for_role(Role.VALUE)], ids=lambda scheme: scheme.name)
def test_a_derived_scheme_inherits_no_kernel(derived: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels encode as int4 and kivi do; a class that derives from them may not."""
    parent = type(derived).__mro__[1]()
    assert parent.in_kernels and not derived.in_kernels
    assert derived.absmax(64) is None and derived.minmax(64) is None
    assert parent.absmax(64) is not None or parent.minmax(64) is not None
    # As the append kernels ask.
    monkeypatch.setitem(schemes.BY_NAME, derived.name, type(derived))
    spec = slot()
    planes = [torch.zeros(plane.shape(1, 1, 2), dtype=plane.dtype) for plane in derived.layout(spec).planes]
    x, pos = torch.randn(1, 2, 1, 64), torch.zeros(1, 1, dtype=torch.int64)
    if derived.window:
        from kvcompile.lowering.append.window_token import WindowSlot, known

        assert known(WindowSlot(x, planes, pos, None, parent.for_role(Role.VALUE).spec())) and not known(
            WindowSlot(x, planes, pos, None, derived.spec())
        )
    else:
        from kvcompile.lowering.append.rows import Rows, fits

        assert fits(Rows(x, planes, pos, parent.spec())) and not fits(Rows(x, planes, pos, derived.spec()))


def test_every_scheme_says_for_itself_whether_kernels_encode() -> None:
    said = {cls.name for cls in SCHEMES if vars(cls).get("kernel_encoding")}
    assert said == {"int8", "int4", "fp8", "kivi", "normed", "squat", "beyond", "int8-static", "fp8-static"}


@each_scheme
def test_prime_head_dim_is_held_or_refused(cls: type[Scheme]) -> None:
    for scheme in (variant.for_role(Role.KEY) for variant in cls.variants()):
        try:
            scheme.check(slot(head_dim=67))
        except HeadDimNotDivisible as error:
            assert "67" in str(error) and cls.name in str(error) and "divisors" in str(error)
        else:
            planes = scheme.encode(torch.ones(1, 1, scheme.block, 67))
            assert scheme.decode(planes, slot(head_dim=67)).shape == (1, 1, scheme.block, 67)
