"""The words that every other module shares: roles, granularities, planes, layouts, kernel formats.

Axes, used as suffixes of tensor names and in every docstring: B batch, H query heads, K kv heads,
G = H/K, S new tokens, T cached tokens, C capacity, D head dim, N pages.

Nothing here computes: numerics live in ``schemes``, state in ``runtime``, kernels in ``lowering``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PAGE = 64
"""Tokens a page holds. Stores grow by whole pages on their first axis, so strides never change."""


class Role(enum.Enum):
    """Which half of an attention a slot feeds."""

    KEY = "key"
    VALUE = "value"


class Half(enum.Enum):
    """Half of an attention that a scheme encodes, where it encodes keys and values differently; ``auto`` is settled by ``of``."""

    AUTO = "auto"
    KEY = "key"
    VALUE = "value"

    def for_role(self, role: Role) -> Half:
        """Return the half that stores a slot of this role."""
        return self if self is not Half.AUTO else Half(role.value)


class Granularity(enum.Enum):
    """The granularity of a scale: a token's head, a group of its channels, or everything written at once."""

    TOKEN = "token"
    GROUP = "group"
    TENSOR = "tensor"


@dataclass(frozen=True)
class SlotSpec:
    """The facts that a scheme must know of one cache slot: kv heads K, head dim D, the model's dtype, the role."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    role: Role

LEAST_HELD = -(1 << 61)
"""A row of a window counts no fewer tokens unless it is broken (``ops.append_window``); one that was only padding so far counts below 0."""


class Extent(enum.Enum):
    """The extent that one plane grows with."""

    TOKENS = "pages of tokens"
    ROW = "one for every batch row"
    BATCH = "one for all batch rows"
    STORE = "as many as its store says"


@dataclass(frozen=True)
class PlaneSpec:
    """One physical tensor of an encoded slot, [N, B, K, rows, width].

    ``rows`` rows cover one page of tokens; a plane that does not grow (N = 1: the window, a codebook, a query
    subspace) has as many rows as it needs, and B = 1 where one serves all batch rows. ``host``: in pinned host
    memory where the store is on a CUDA device, which reads and writes it there. ``tally``: attention writes it, and no
    append takes it; such planes are the last of a layout. ``originals``: holds tokens as the model made them.
    ``placed``: says where in this very store something is, so a store whose tokens are moved begins it anew. ``constant``: holds
    what its scheme's ``constants`` says, in every store, and no append takes it but behind a window; such planes follow those that grow.
    ``shared``: one for all heads, K = 1. ``pooled``: B = 1, tokens of all rows behind each other. ``first``: holds the position of the
    first token in the planes that grow, int64, and an append counts from there; all planes of such a layout but the encoded are ``tally``.
    ``encoding``: a constant plane that ``encode`` takes behind the tokens. Attention reads it too (static scales) or never (thresholds);
    those that it never reads follow the other constant ones. ``early``: holds first tokens as they are, or where a row's first token
    stands; ``keep_first`` writes it, and no append takes it. Such planes stand behind all but attention's own.
    """

    name: str
    dtype: torch.dtype
    width: int
    rows: int = PAGE
    extent: Extent = Extent.TOKENS
    host: bool = False
    tally: bool = False
    originals: bool = False
    placed: bool = False
    constant: bool = False
    shared: bool = False
    pooled: bool = False
    first: bool = False
    encoding: bool = False
    early: bool = False

    def shape(self, pages: Any, batch: Any, heads: Any) -> tuple[Any, Any, Any, int, int]:
        """The allocated shape for ``pages`` pages, [N, B, K, rows, width]; empty where the store says how many there are."""
        n = pages if self.extent is Extent.TOKENS else 0 if self.extent is Extent.STORE else 1
        return self.shape_of(n, batch, heads)

    def shape_of(self, n: Any, batch: Any, heads: Any) -> tuple[Any, Any, Any, int, int]:
        """The shape with ``n`` along its first axis."""
        return (n, 1 if self.pooled or self.extent is Extent.BATCH else batch, 1 if self.shared else heads, self.rows, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of one page of one head of one batch row, or of the whole plane's head where it does not grow."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page of tokens adds, of one head of one batch row."""
        return self.nbytes if self.extent is Extent.TOKENS else 0


@dataclass(frozen=True)
class Layout:
    """The planes of one encoded slot: those that ``encode`` returns, in its order, then those that do not grow, then attention's own."""

    planes: tuple[PlaneSpec, ...]

    @property
    def encoded(self) -> int:
        """How many planes ``encode`` makes: the ones that grow with the tokens, but for what attention alone writes."""
        return sum(plane.extent is Extent.TOKENS and not plane.tally for plane in self.planes)

    @property
    def written(self) -> int:
        """How many planes an append takes, the first ones: what is encoded, or all but attention's own where there is a window."""
        return sum(not (plane.tally or plane.early) for plane in self.planes) if self.is_windowed else self.encoded

    @property
    def is_windowed(self) -> bool:
        """Whether the newest tokens stay in full precision."""
        return any(plane.name == "window" for plane in self.planes)

    @property
    def first(self) -> int | None:
        """The index of the plane that says where the planes that grow begin; None where they begin at 0."""
        return next((index for index, plane in enumerate(self.planes) if plane.first), None)

    @property
    def ordered(self) -> bool:
        """Whether something beside the codes needs the tokens in their order: a window, planes computed from queries."""
        return any(plane.extent is not Extent.TOKENS and not plane.constant for plane in self.planes)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of tokens of one head of one batch row, all planes."""
        return sum(plane.bytes_per_page for plane in self.planes)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one head of one batch row whatever the length: windows."""
        return sum(plane.nbytes for plane in self.planes if plane.extent is Extent.ROW and not plane.shared)

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one head whatever the length and the batch: codebooks, shared subspaces."""
        return sum(plane.nbytes for plane in self.planes if plane.extent is Extent.BATCH and not plane.shared)

    def windowed(self, slot: SlotSpec, window: int) -> Layout:
        """Return the layout with the newest ``window`` tokens in full precision, and a count of the tokens, behind what is encoded."""
        grown, fixed = self.planes[: self.encoded], self.planes[self.encoded :]
        constant = tuple(plane for plane in fixed if plane.constant)
        own = tuple(plane for plane in fixed if plane.name not in {"window", "clock"} and not plane.constant)
        added = PlaneSpec("window", slot.dtype, slot.head_dim, window, Extent.ROW), PlaneSpec("clock", torch.int64, 2, 1, Extent.ROW)
        return Layout((*grown, *constant, *added, *own))

    def with_sinks(self, slot: SlotSpec, count: int) -> Layout:
        """Return the layout with each row's first ``count`` tokens in full precision, and where the first stands if no clock says so."""
        others = tuple(plane for plane in self.planes if not plane.early)
        if not count:
            return Layout(others)
        rows = PlaneSpec("sinks", slot.dtype, slot.head_dim, count, Extent.ROW, early=True)
        origin = PlaneSpec("origin", torch.int64, 1, 1, Extent.ROW, shared=True, early=True)
        kept, own = (tuple(plane for plane in others if plane.tally is tally) for tally in (False, True))
        return Layout((*kept, rows, *(() if self.is_windowed else (origin,)), *own))

    def nbytes(self, pages: Any, batch: Any, heads: Any) -> Any:
        """Bytes of all planes of ``pages`` pages, ``batch`` rows and ``heads`` kv heads, without those whose size their store says.

        The three are whole numbers, or sympy expressions for them: what is announced, planned and held comes from this one formula.
        """
        shared = sum(math.prod(plane.shape(pages, batch, heads)) * plane.dtype.itemsize for plane in self.planes if plane.shared)
        return heads * (batch * (pages * self.bytes_per_page + self.bytes_per_row) + self.bytes_per_head) + shared

    def bytes_per_token(self, heads: int) -> float:
        """Bytes one token of one batch row costs over ``heads`` kv heads."""
        return heads * self.bytes_per_page / PAGE


@dataclass(frozen=True)
class KernelFormat:
    """How a kernel reads one encoded slot; the scheme's side of the one attend template.

    Channel ``c`` of a token lives in word ``c % (D // parts)`` as part ``c // (D // parts)``: parts are
    planar, so sub-dot ``i`` takes part ``i`` of every word and neither q nor v is ever shuffled.
    ``unpack(words, part)`` is the eager definition (words in ``word_dtype`` -> float32 values before
    scaling); templates print the very expression that it traces to. The value of a channel is
    ``unpack(word, part) * scale (+ zero)`` with one scale per ``group`` consecutive channels (``group`` = D:
    one a token) of ``block`` consecutive tokens; a page has PAGE / block rows of scales. ``zeros``: a plane of
    zero points stands behind the scales, laid out like them. ``levels``: what ``unpack`` gives is an index into a
    table of that many entries, one for each kv head and ``group`` of channels, the last plane that a kernel
    reads, [1, 1, K, D // group, levels]; the value is ``table[index] * scale (+ zero)``.
    ``scaled`` is False where the codes are the values (dense). ``segments`` > 1: a word is that many bytes, the
    lowest first, byte i from the i-th of equal segments of the row; ``unpack`` then takes it as ``whole_dtype``.
    ``norms``: a plane of one number a token stands behind the zero points, [N, B, K, page, 1]; the value is times it.
    ``static``: the value is ``unpack(word, part)`` times one scale for each kv head, float32, the last plane that a kernel reads,
    [1, 1, K, 1, 1]; there are no scales of tokens then, so codes themselves hold NaN.
    """

    word_dtype: torch.dtype
    parts: int
    group: int
    scaled: bool
    unpack: Callable[[torch.Tensor, int], torch.Tensor]
    block: int = 1
    zeros: bool = False
    levels: int = 0
    segments: int = 1
    static: bool = False
    norms: bool = False

    @property
    def planes(self) -> int:
        """How many planes a kernel reads: words, scales, zero points, norms, tables or static scales; no further ones."""
        return self.norms_at + self.norms + self.ends_constant

    @property
    def norms_at(self) -> int:
        """The index of the plane of norms, where there is one."""
        return 1 + self.scaled + self.zeros

    @property
    def coded(self) -> bool:
        """Whether words are codes that scales belong to, those of tokens or static ones; the values themselves otherwise."""
        return self.scaled or self.static

    @property
    def ends_constant(self) -> bool:
        """Whether the last plane that a kernel reads is constant: a table, or static scales."""
        return bool(self.levels) or self.static

    @property
    def whole_dtype(self) -> torch.dtype:
        """The dtype of a word that is put together from its segments: int32, or int64 where it has more than four bytes."""
        return torch.int64 if self.segments > 4 else torch.int32

    @property
    def symmetric(self) -> bool:
        """Whether one multiplication by a token's own scale decodes: what the first templates were made for."""
        return self.block == 1 and not self.zeros and not self.levels and not self.norms and self.segments == 1


@dataclass(frozen=True)
class Static:
    """An encoding by given scales that a kernel may do: one plane of codes of a byte; scales [1, 1, K, 1, 1] come with the tokens.

    code = rne(clamp(x / scale)) with magnitudes up to ``largest``: two's complement, -128 where x is not finite; or e4m3 and its NaN.
    """

    largest: float
    e4m3: bool


@dataclass(frozen=True)
class MinMax:
    """An encoding by minimum and maximum that a kernel may do: planes codes, scales, zeros; groups as in ``KernelFormat``.

    ``subblock``: where it is not 0, so many channels are encoded at a time, and their errors, times the last plane [1, 1 or B, K,
    D, D], float32, are added to the channels behind them; a group whose error is not finite adds nothing. ``norms``: tokens are divided by
    half the root mean square of their channels, which a plane behind the zero points holds (``schemes.normed``); no ``subblock`` then.
    """

    bits: int
    parts: int
    segments: int
    group: int
    block: int
    subblock: int = 0
    norms: bool = False


@dataclass(frozen=True)
class AbsMax:
    """An encoding by the largest magnitude that a kernel may do: planes codes, scales; groups of channels as in ``KernelFormat``.

    code = rne(clamp(x / scale)) with magnitudes up to ``largest``: two's complement where one part fills a byte, else
    plus half of the range; or e4m3.
    """

    bits: int
    parts: int
    group: int
    largest: float
    e4m3: bool


@dataclass(frozen=True)
class Bins:
    """An encoding by minimum, step and thresholds that a kernel may do: planes codes, scales, zeros; groups as in ``KernelFormat``.

    code = how many of the 2^bits - 1 thresholds of the group's table are not above (x - zero) / scale; a plane of thresholds float32
    [1, 1, K, D // group, 2^bits - 1] comes with the tokens.
    """

    bits: int
    parts: int
    segments: int
    group: int


NUMBERS = frozenset({"item", "_local_scalar_dense"})
"""Operators and methods that take a number out of a tensor of one element."""
QUERY_ROWS = "kvcompile_query_rows"
"""The metadata of a rewritten graph's attention that says how many rows of queries a kv head has."""

QUERY_GROUP = "kvcompile_query_group"
"""That says how many query heads share a kv head."""

BESIDE = "kvcompile_beside"
"""That says that an attention is a further part of its site's: over learned tokens, or of some heads."""


def pages_for(tokens: int) -> int:
    """Whole pages that hold ``tokens`` tokens."""
    return math.ceil(tokens / PAGE)
