"""Axes of an acceptance case as enums, and the frozen record of one case with its printable identifier."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Family(enum.Enum):
    """Architectures whose attention is spelled alike; pairs of schemes and head dims are covered by family."""

    GROUPED = "grouped"
    UNGROUPED = "ungrouped"
    LATENT = "latent"
    PRODUCTS = "products"
    GROUPED_PRODUCTS = "grouped-products"
    SINKS = "sinks"
    BIAS = "bias"
    SOFTCAP = "softcap"
    SLIDING = "sliding"
    HYBRID = "hybrid"
    ENCODER = "encoder"
    EXPERTS = "experts"
    BUFFER = "buffer"
    CONCAT = "concat"
    PAGED = "paged"


class Caching(enum.Enum):
    """How the cache is held, and who drives the decode loop."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    GENERATE = "generate"
    GENERATE_DYNAMIC = "generate-dynamic"

    @property
    def generates(self) -> bool:
        """Return whether ``model.generate`` drives the loop."""
        return self in {Caching.GENERATE, Caching.GENERATE_DYNAMIC}

    @property
    def grows(self) -> bool:
        """Return whether the cache tensors grow with every token."""
        return self in {Caching.DYNAMIC, Caching.GENERATE_DYNAMIC}


class Mode(enum.Enum):
    """The ``mode`` of ``torch.compile``."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune-no-cudagraphs"

    @property
    def argument(self) -> str | None:
        """Return what ``torch.compile`` takes as its ``mode``."""
        return None if self is Mode.DEFAULT else self.value


class Prompt(enum.Enum):
    """Who runs the prompt: the compiled model, or the uncompiled one, whose filled cache is then adopted."""

    COMPILED = "compiled"
    EAGER = "eager"


class Scheme(enum.Enum):
    """Schemes by name: every one of ``kvcompile.schemes.SCHEMES`` that runs on CUDA, one mixed pair, options that change how caches work.

    ``beyond`` runs with uniform tables, since no text of a scheme has learned ones, and static scales cover ``amax``. ``smartkv`` runs with
    a budget that can be met by the few tokens of a request, so that widths are decided in it.
    """

    DENSE = "dense"
    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    GAUSS = "gauss"
    FP8 = "fp8"
    KIVI = "kivi"
    NORMED = "normed"
    SQUAT = "squat"
    CERTIFIED = "certified"
    BEYOND = "beyond"
    INT8_STATIC = "int8-static"
    FP8_STATIC = "fp8-static"
    SMARTKV = "smartkv"
    MIXED = "fp8+int4"
    ROTATED = "int4-rotated"
    FIRST = "int8-sinks"

    def spec(self, head_dim: int) -> dict[str, str]:
        """Return {"k": spec, "v": spec} with groups that divide ``head_dim``."""
        odd = head_dim % 32 != 0
        grouped = {"int4": "group=16", "nf4": "group=16", "kivi": "group=16", "normed": "group=16", "squat": "group=16,subblock=16"}
        more = {Scheme.SMARTKV: "budget=0.9", Scheme.ROTATED: "rotate=kv", Scheme.FIRST: "sinks=4", Scheme.NORMED: "sinks=4"}
        parts = self.value.removesuffix("-rotated").removesuffix("-sinks").split("+")
        found = {}
        for half, name in (("k", parts[0]), ("v", parts[-1])):
            options = ",".join(filter(None, (grouped.get(name, "") if odd else "", more.get(self, ""))))
            found[half] = f"{name}({options})" if options else name
        return found

    @property
    def plain(self) -> bool:
        """Return whether a token's codes are its own and all there is of it, so that every kind of cache can hold them."""
        return not self.windowed and self not in {Scheme.SMARTKV, Scheme.FIRST}

    @property
    def windowed(self) -> bool:
        """Return whether the newest tokens stay in full precision beside the codes."""
        return self in {Scheme.KIVI, Scheme.NORMED, Scheme.SQUAT, Scheme.CERTIFIED}


class HeadDim(enum.IntEnum):
    """Channels of one head."""

    D64 = 64
    D80 = 80
    D96 = 96
    D128 = 128
    D256 = 256


class Batch(enum.Enum):
    """Rows of a batch: one, or three of which two are padded on the left."""

    ONE = "one"
    PADDED = "padded"

    @property
    def pads(self) -> tuple[int, ...]:
        """Return the number of padding tokens in front of each row."""
        return (0,) if self is Batch.ONE else (4, 0, 1)


class Dtype(enum.Enum):
    """The dtype of weights, activations and the uncompressed cache."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"


class Trait(enum.Enum):
    """What decides which combinations exist for an architecture."""

    SLIDING = "some caches keep their newest tokens only"
    LATENT = "keys and values are made from a cached latent"
    CROSS = "attends to an encoder's states, which are only read"
    EXPERTS = "a router picks experts, so a rounding may pick others"
    HYBRID = "some layers keep a state instead of keys and values"
    MODULE = "a hand-written module, no transformers model"
    PAGED = "a pool of blocks that is read through a gather"
    NO_STATIC = "transformers cannot use it with a static cache"
    SPLIT_STATIC = "with a static cache a graph break stands inside its attention"
    FROM_THE_END = "with a static cache its windows count from the cache's end: tokens attend to nothing, or to what was never written"
    HALF_MASK = "its scores are float32 beside float16 weights, whose lowest number hides no token for sure there: padding counts as tokens"
    NO_DYNAMIC = "it has a cache of one form only, and that is static"
    NO_PADDING = "it takes no padding mask"
    NO_GENERATE = "generate does not take what its decoder needs"
    STEPS_BACK = "padded rows write their next token over padding, which schemes with a window answer with NaN"
    FLOAT32 = "it overflows or mixes dtypes in half precision without a compiler too"
    FIXED_DIM = "its head dim is no setting"


@dataclass(frozen=True)
class Architecture:
    """One model type, the attention implementation it is built with, and its traits."""

    name: str
    family: Family
    attention: str = "sdpa"
    traits: frozenset[Trait] = frozenset()

    def __str__(self) -> str:
        return self.name if self.attention == "sdpa" or Trait.MODULE in self.traits else f"{self.name}/{self.attention}"


@dataclass(frozen=True)
class Case:
    """One combination of all axes."""

    architecture: Architecture
    caching: Caching
    mode: Mode
    prompt: Prompt
    scheme: Scheme
    head_dim: HeadDim
    batch: Batch
    dtype: Dtype

    @property
    def id(self) -> str:
        """Return the identifier that ``--case`` takes."""
        return "-".join((
            str(self.architecture), self.scheme.value, self.caching.value, self.prompt.value, self.mode.value,
            f"d{int(self.head_dim)}", self.batch.value, self.dtype.value,
        ))

    def value(self, axis: str) -> Any:
        """Return the value of one of ``AXES``; of ``family`` the architecture's."""
        return self.architecture.family if axis == "family" else getattr(self, axis)


AXES: dict[str, tuple[Any, ...]] = {
    "family": tuple(Family), "scheme": tuple(Scheme), "head_dim": tuple(HeadDim), "caching": tuple(Caching), "mode": tuple(Mode),
    "dtype": tuple(Dtype), "prompt": tuple(Prompt), "batch": tuple(Batch),
}
"""The axes between which every valid pair of values is covered."""

SPREAD = ("caching", "mode", "prompt", "batch", "dtype")
"""The axes whose every valid value each architecture meets by itself, beyond what its family does."""
