"""Schemes: every registered scheme with options that fit small heads, and how far its results may lie from those of plain tensors.

Keys and values of a program are signs times a magnitude, which nearly every scheme stores almost without loss: the ends of a group's
range are always codes. ``gauss`` has no code for them: its tokens are made of its levels. So a lossy scheme is held to nearly what a
dense one is, and a token that is lost, stands at a wrong position or has another token's scale is seen.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Magnitudes(enum.Enum):
    """What signs are multiplied by so that a scheme stores them without loss."""

    LEVELS = "magnitudes of ``LEVEL_COUNTS`` in a random order, and a power of two for each token"
    FREE = "normal numbers, no signs at all"
    TOKEN = "a power of two for each token"
    ONE = "one"


@dataclass(frozen=True)
class Stored:
    """A scheme as text for ``kvcompile.backend``, the magnitudes that it keeps, and its share of the largest result that may be lost.

    ``of_ones``: the share that is lost in addition where a program fills places with one number, for which the scheme has no code.
    """

    text: str
    magnitudes: Magnitudes
    loss: float
    of_ones: float = 0.0


LEVEL_COUNTS = (3, 1, 6, 0, 4, 1, 1, 0)
"""How many of 16 channels have each magnitude of ``schemes.gauss.ABOVE_ZERO[4]``. Their mean square is one but for 4e-5, so each is a level
of the token's own norm, and is again after it was decoded and encoded. Signs, which have one magnitude, lose 5.8% each time."""

SCHEMES = {
    "dense": Stored("dense", Magnitudes.FREE, 0.0),
    "int8": Stored("int8", Magnitudes.TOKEN, 0.02),
    "int4": Stored("int4(group=16)", Magnitudes.TOKEN, 0.02),
    "nf4": Stored("nf4(group=16)", Magnitudes.TOKEN, 0.02),
    "gauss": Stored("gauss(rotate=none)", Magnitudes.LEVELS, 0.002, 0.2),
    "fp8": Stored("fp8", Magnitudes.TOKEN, 0.02),
    "kivi": Stored("kivi(bits=4,group=16,window=16)", Magnitudes.ONE, 0.1),
    "normed": Stored("normed(bits=4,group=16,window=16)", Magnitudes.ONE, 0.4),
    "squat": Stored("squat(bits=4,group=16,window=16,rank=4,subblock=8,rotate=none)", Magnitudes.ONE, 0.1),
    "certified": Stored("certified", Magnitudes.ONE, 0.03),
    "smartkv": Stored("smartkv(budget=1.0)", Magnitudes.ONE, 0.03),
    "beyond": Stored("beyond(bits=4)", Magnitudes.TOKEN, 0.02),
    "int8-static": Stored("int8-static(amax=127.0)", Magnitudes.ONE, 0.02),
    "fp8-static": Stored("fp8-static(amax=448.0)", Magnitudes.ONE, 0.02),
}
"""By name, the exact one first. ``loss`` was measured over programs that are right; zeros between signs cost kivi 1/15 of a sign."""

OF_ONES = {("event", "row-fill"), ("event", "row-filled-by-index"), ("then", "row-fill"), ("then", "row-filled-by-index")}
"""Features by which a program fills places with one number; the second event may have them encoded again."""

BY_TOKEN = frozenset({"dense", "int8", "int4", "nf4", "gauss", "fp8", "beyond", "int8-static", "fp8-static"})
"""Those that encode each token by itself, so that unwritten places of any magnitude change no other's codes."""

WINDOWED = frozenset({"kivi", "normed", "squat", "certified"})
"""Those that keep the newest tokens of a row as they are, and take them in their order."""
