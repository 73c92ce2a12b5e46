"""All settings of one backend, in one frozen dataclass; there are no environment variables."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Self

from kvcompile.errors import BadSetting


class OneOf(enum.Enum):
    """A setting that has one of a few names; its class is named for the setting."""

    @classmethod
    def of(cls, value: object) -> Self:
        """From a member or its name; raises BadSetting."""
        try:
            return cls(value)
        except ValueError:
            expected = " or ".join(repr(item.value) for item in cls)
            raise BadSetting(setting=cls.__name__.lower(), expected=expected, found=value) from None


class Inner(OneOf):
    """The inner compiler of the rewritten graph."""

    INDUCTOR = "inductor"
    AOT_EAGER = "aot_eager"
    EAGER = "eager"


class Validate(OneOf):
    """The sites that are rewritten, by what is known when they were run beside their rewritten twins as they were compiled."""

    ALWAYS = True
    """Only sites whose twin was found equal are rewritten; others stay as they are."""
    WHERE_POSSIBLE = "where possible"
    """Sites that could not be run beside their twin are rewritten too, with a warning: those of whose rewrite nothing is known."""
    NEVER = False
    """Nothing is run: every site is rewritten that was understood."""

    @classmethod
    def of(cls, value: object) -> Self:
        """From a member or its spelling: True, False or "where possible"; raises BadSetting."""
        # 1 and 0 are equal to True and False, and nobody means these by them.
        return super().of(value if isinstance(value, (bool, str, cls)) else repr(value))


class Gluon(OneOf):
    """Which attentions of one new token the Gluon kernel runs on CUDA; the Triton template runs the others."""

    MEASURED = "measured"
    """Those for which it was measured to be faster: launched from CUDA graphs, on devices and over codes that were measured."""
    ALWAYS = "always"
    """All that it computes, over other codes, heads and devices too, and launched by Python where there are no CUDA graphs."""
    NEVER = "never"


@dataclass(frozen=True)
class Settings:
    """``inner`` compiler, ``strict`` refusals, Inductor's ``mode`` and ``options``, the least tokens a store holds.

    ``validate``: which sites are rewritten by what validation found. ``fold``: equal layers are compiled once.
    ``gluon``: which attentions the Gluon kernel runs.
    """

    inner: Inner = Inner.INDUCTOR
    strict: bool = False
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reserve: int = 256
    verify: bool = True
    validate: Validate = Validate.ALWAYS
    fold: bool = False
    gluon: Gluon = Gluon.MEASURED
