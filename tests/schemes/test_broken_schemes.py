"""Schemes that lie, each in one way: the law that says so catches it, and what it reports names the law and what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import sympy
import torch

from kvcompile.errors import KvcompileError, LawBroken, NoScheme, NotConforming, UnknownScheme
from kvcompile.schemes import AMAX, Int8, Nf4, Planes, Scheme, parse
from kvcompile.testing import LAWS, conformance
from kvcompile.testing.__main__ import main
from kvcompile.testing.files import schemes_of
from kvcompile.testing.suite import COMPILED, outcomes
from kvcompile.types import KernelFormat, Layout, PlaneSpec, SlotSpec

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
BY_NAME = {law.name: law for law in LAWS}


@dataclasses.dataclass(frozen=True)
class Honest(Scheme):
    """Eight bits and a scale a token, in as few lines as it takes."""

    name: ClassVar[str] = "honest"

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((PlaneSpec("codes", torch.int8, slot.head_dim), PlaneSpec("scales", torch.float32, 1)))

    def format(self, slot: SlotSpec) -> KernelFormat:
        return KernelFormat(torch.int8, 1, slot.head_dim, True, self.unpack)

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        """The code itself."""
        return words.to(torch.float32)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale of each token, NaN where it is not finite."""
        amax = x.abs().amax(-1, keepdim=True)
        return torch.where(torch.isfinite(amax), (amax / 127).clamp(min=2.0**-120), float("nan"))

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        x = x_BKSD.to(torch.float32)
        scale = self.scale(x)
        return torch.round(x / scale).clamp(-127, 127).nan_to_num().to(torch.int8), scale

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        return AMAX / 127 * (sympy.Rational(1, 2) + sympy.Float(2.0**-14)) + sympy.Float(2.0**-120)


@dataclasses.dataclass(frozen=True)
class SmallBound(Honest):
    """Announces half of the error that it makes."""

    name: ClassVar[str] = "small-bound"

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        return super().bound(slot) / 2


@dataclasses.dataclass(frozen=True)
class HugeBound(Honest):
    """Announces a bound that says nothing."""

    name: ClassVar[str] = "huge-bound"

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        return AMAX


@dataclasses.dataclass(frozen=True)
class Float16Scales(Honest):
    """Stores scales in float16, in which those of small tokens vanish and those of large ones overflow."""

    name: ClassVar[str] = "float16-scales"

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((PlaneSpec("codes", torch.int8, slot.head_dim), PlaneSpec("scales", torch.float16, 1)))

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        codes, scale = super().encode(x_BKSD)
        return codes, scale.to(torch.float16)

    def bound(self, slot: SlotSpec) -> sympy.Expr:
        return super().bound(slot) + AMAX * sympy.Float(2.0**-10)


@dataclasses.dataclass(frozen=True)
class NarrowLayout(Honest):
    """Announces half of the codes."""

    name: ClassVar[str] = "narrow-layout"

    def layout(self, slot: SlotSpec) -> Layout:
        return Layout((PlaneSpec("codes", torch.int8, slot.head_dim // 2), PlaneSpec("scales", torch.float32, 1)))


@dataclasses.dataclass(frozen=True)
class HidesNan(Honest):
    """Leaves NaN out of the scale, so that a code stands for a number."""

    name: ClassVar[str] = "hides-nan"

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return super().scale(x.nan_to_num(0.0, 0.0, 0.0))


@dataclasses.dataclass(frozen=True)
class OtherWhenTraced(Honest):
    """Unpacks otherwise where it is traced, which is what kernels are printed from."""

    name: ClassVar[str] = "other-when-traced"

    def unpack(self, words: torch.Tensor, part: int) -> torch.Tensor:
        return words.to(torch.float32) if isinstance(words, torch.Tensor) else (words + 1).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class OwnDecode(Honest):
    """Decodes otherwise than its format says."""

    name: ClassVar[str] = "own-decode"

    def decode(self, planes: Planes, slot: SlotSpec) -> torch.Tensor:
        return super().decode(planes, slot) * 1.001


@dataclasses.dataclass(frozen=True)
class SharedScale(Honest):
    """Gives all tokens of a write one scale, and says that each has its own."""

    name: ClassVar[str] = "shared-scale"

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return super().scale(x).amax((-1, -2), keepdim=True).expand(*x.shape[:3], 1).contiguous()

    def bound(self, slot: SlotSpec) -> None:
        return None


@dataclasses.dataclass(frozen=True)
class ByMemory(Honest):
    """Reads its tokens as they lie in memory."""

    name: ClassVar[str] = "by-memory"

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        return super().encode(x_BKSD.as_strided(x_BKSD.shape, torch.empty(x_BKSD.shape).stride()))


@dataclasses.dataclass(frozen=True)
class SmallRange(Honest):
    """Says that it holds no more than a hundred."""

    name: ClassVar[str] = "small-range"

    @property
    def largest(self) -> float:
        return 100.0


@dataclasses.dataclass(frozen=True)
class NoZeros(Honest):
    """Has no code for zero."""

    name: ClassVar[str] = "no-zeros"

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        codes, scale = super().encode(x_BKSD)
        return torch.where(codes == 0, 1, codes), scale.clamp(min=1e-3)


@dataclasses.dataclass(frozen=True)
class ForgetsAnOption(Honest):
    """Leaves its option out of its text."""

    bits: int = 8
    name: ClassVar[str] = "forgets-an-option"

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        return cls(), cls(bits=4)

    def spec(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class FirstRowOnly(Honest):
    """Gives every row of a batch the scales of its first one."""

    name: ClassVar[str] = "first-row-only"

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return super().scale(x)[:1].expand(x.shape[0], -1, -1, -1).contiguous()


LIARS = {
    SmallBound: "round_trip_is_within_the_bound", HugeBound: "bound_is_not_vacuous",
    Float16Scales: "any_magnitude_stays_within_the_bound", NarrowLayout: "encode_returns_the_planes_of_the_layout",
    HidesNan: "nan_and_inf_never_become_numbers", OtherWhenTraced: "printed_expressions_equal_unpack",
    OwnDecode: "decode_is_what_the_format_says", SharedScale: "append_in_pieces_equals_append_at_once",
    ByMemory: "strides_do_not_matter", SmallRange: "range_covers_float16", NoZeros: "zeros_come_back_as_zeros",
    ForgetsAnOption: "spelling_reads_back", FirstRowOnly: "a_block_is_encoded_alone",
}


@pytest.mark.parametrize(("liar", "name"), LIARS.items(), ids=[liar.name for liar in LIARS])
def test_the_law_that_a_scheme_breaks_says_so(liar: type[Scheme], name: str) -> None:
    (outcome,) = outcomes(liar, [BY_NAME[name]])
    assert outcome.broken is not None, "the scheme was believed"
    facts = outcome.broken.facts
    assert facts["law"] == name and facts["todo"] and facts["found"] != facts["expected"]
    assert isinstance(outcome.broken, AssertionError) and name in str(outcome.broken)
    (fine,) = outcomes(Honest, [BY_NAME[name]])
    assert fine.broken is None and fine.tried


def test_all_laws_hold_of_a_scheme_of_four_members(fresh_dynamo: None) -> None:
    found = conformance(Honest, compile=False)
    assert {outcome.law for outcome in found} == set(LAWS) - COMPILED
    assert all(outcome.tried and not outcome.left_out for outcome in found)
    with pytest.raises(UnknownScheme):
        parse("honest")


@pytest.mark.parametrize(("liar", "name"), [(OwnDecode, "decode_is_what_the_format_says"), (SmallRange, "range_covers_float16")])
def test_what_is_broken_is_raised_together(liar: type[Scheme], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laws = (BY_NAME["spelling_reads_back"], BY_NAME[name], BY_NAME["zeros_come_back_as_zeros"])
    monkeypatch.setattr("kvcompile.testing.suite.LAWS", laws)
    with pytest.raises(AssertionError, match=name) as caught:
        conformance(liar)
    assert isinstance(caught.value, NotConforming) and isinstance(caught.value, KvcompileError)
    assert caught.value.facts["count"] == 1 and caught.value.facts["tried"] == 3


def test_an_exception_of_the_scheme_breaks_the_law() -> None:
    class Raises(Honest):
        name: ClassVar[str] = "raises"

        def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
            raise IndexError("out of codes")

    with pytest.raises(LawBroken, match="IndexError: out of codes"):
        BY_NAME["zeros_come_back_as_zeros"](Raises())


def test_a_file_a_name_and_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (example,) = schemes_of(str(ROOT / "examples" / "add_a_scheme.py"))
    assert example.name == "fp4" and schemes_of("int8") == (Int8,) and schemes_of("nf4") == (Nf4,)
    nothing, taken = tmp_path / "defines_nothing.py", tmp_path / "pathlib.py"
    nothing.write_text("import kvcompile\n")
    taken.write_text("import kvcompile\n")
    for text, said in (("int9", "neither"), (f"{tmp_path}/none.py", "no file"), (f"{nothing}", "defines none"), (f"{taken}", "another")):
        with pytest.raises(NoScheme, match=said):
            schemes_of(text)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "add_a_scheme.py")
    assert main([example, "--law", "spelling_reads_back"]) == 0
    assert "spelling_reads_back" in capsys.readouterr().out
    assert main([str(ROOT / "none.py")]) == 2
    assert "no file" in capsys.readouterr().err


def test_it_needs_no_test_framework() -> None:
    text = "import kvcompile.testing, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "kvcompile.testing.caches" in loaded and not loaded & {"pytest", "hypothesis", "transformers"}
