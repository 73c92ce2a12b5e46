"""Settings of one backend: a frozen dataclass and its enums. There are no environment variables."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Self

from kvcompile.errors import BadSetting


class OneOf(enum.Enum):
    """A setting with a few named values; the lower-case class name is the setting's name."""

    @classmethod
    def of(cls, value: object) -> Self:
        """Return the member for a member or its value. Raises BadSetting for anything else."""
        try:
            return cls(value)
        except ValueError:
            expected = " or ".join(repr(item.value) for item in cls)
            raise BadSetting(setting=cls.__name__.lower(), expected=expected, found=value) from None


class Inner(OneOf):
    """The compiler of the rewritten graph."""

    INDUCTOR = "inductor"
    AOT_EAGER = "aot_eager"
    EAGER = "eager"


class Validate(OneOf):
    """The sites to rewrite, depending on whether each gives the same results as its rewritten twin when both are run at compilation."""

    ALWAYS = True
    """Rewrite only sites whose twin gave equal results."""
    WHERE_POSSIBLE = "where possible"
    """Also rewrite, with a warning, sites that could not be run."""
    NEVER = False
    """Run nothing and rewrite every matched site."""

    @classmethod
    def of(cls, value: object) -> Self:
        """Return the member for a member, True, False or "where possible". Raises BadSetting for anything else."""
        # 1 == True and 0 == False would be accepted by value; an int here is a mistake.
        return super().of(value if isinstance(value, (bool, str, cls)) else repr(value))


class Gluon(OneOf):
    """The attentions of one new token that the Gluon kernel runs on CUDA; the Triton template runs the others."""

    MEASURED = "measured"
    """Those that were measured to be faster: launched from CUDA graphs, on the measured devices and codes."""
    ALWAYS = "always"
    """Every attention that the kernel supports: unmeasured codes, heads and devices too, and launched from Python without CUDA graphs."""
    NEVER = "never"


@dataclass(frozen=True)
class Settings:
    """Settings of one backend; ``backend`` documents each.

    ``inner``: compiler of the rewritten graph. ``strict``: raise on refusals. ``mode``, ``options``: for Inductor.
    ``reserve``: the smallest number of tokens that a store allocates. ``verify``: check rewritten graphs (``passes.verify``).
    ``validate``: which sites are rewritten. ``fold``: compile equal layers once. ``gluon``: which attentions the Gluon kernel runs.
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
