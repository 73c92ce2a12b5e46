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

    ``fold``: equal layers are compiled once. ``gluon``: which attentions the Gluon kernel runs.
    """

    inner: Inner = Inner.INDUCTOR
    strict: bool = False
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reserve: int = 256
    verify: bool = True
    validate: bool = True
    fold: bool = False
    gluon: Gluon = Gluon.MEASURED
