"""Types that all other modules share: roles, granularities, planes, layouts, kernel formats.

Axes, used as suffixes of tensor names and in every docstring:

    B batch, H query heads, K kv heads, G = H/K, S new tokens, T cached tokens, C capacity, D head dim, N pages

Nothing here computes: numerics are in ``schemes``, state in ``runtime``, kernels in ``lowering``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PAGE = 64
"""Tokens per page. Stores grow by whole pages along their first axis, so strides never change."""


class Role(enum.Enum):
    """The operand of attention that a slot holds: keys or values."""

    KEY = "key"
    VALUE = "value"


class KeyOrValue(enum.Enum):
    """The operand that a scheme encodes if it encodes keys and values differently; ``for_role`` resolves AUTO."""

    AUTO = "auto"
    KEY = "key"
    VALUE = "value"

    def for_role(self, role: Role) -> KeyOrValue:
        """Return KEY or VALUE: AUTO becomes the slot's role."""
        return self if self is not KeyOrValue.AUTO else KeyOrValue(role.value)


Half = KeyOrValue
"""The name in pickles of version 0.1 (``files.pickled``)."""


class Granularity(enum.Enum):
    """The elements that share a scale: one token of one head, a group of its channels, or all tokens of one write."""

    TOKEN = "token"
    GROUP = "group"
    TENSOR = "tensor"


@dataclass(frozen=True)
class SlotSpec:
    """Facts of one cache slot that a scheme needs: kv heads K, head dim D, the model's dtype, the role."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    role: Role

LEAST_HELD = -(1 << 61)
"""Smallest token count of an intact row of a window; a lower count marks a broken row (``ops.append_window``). A row of padding only counts
below 0, but not this low."""


class Extent(enum.Enum):
    """The quantity that the first axis of a plane grows with."""

    TOKENS = "pages of tokens"
    ROW = "one for every batch row"
    BATCH = "one for all batch rows"
    STORE = "as many as its store says"


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of an encoded slot, [N, B, K, rows, width].

    ``rows`` rows hold one page of tokens. A plane that does not grow (N = 1: a window, a codebook, a query subspace) has as many rows as it
    needs, and B = 1 if all batch rows share it.
    ``extent``: the quantity that N grows with.
    ``host``: kept in pinned host memory if the store is on a CUDA device; the device reads and writes it there.
    ``tally``: written by attention and taken by no append. These planes come last in a layout.
    ``originals``: holds tokens in full precision, as the model computed them.
    ``placed``: holds indices into this store, so it is reset when the store's tokens are moved.
    ``constant``: filled from ``Scheme.constants``, equal in every store; an append takes it only behind a window. Follows the planes that
        grow.
    ``shared``: one for all heads, K = 1.
    ``pooled``: B = 1; the tokens of all batch rows are stored one after another.
    ``first``: holds the position of the first token in the planes that grow, int64; an append counts from there. In such a layout every
        plane that is not encoded is ``tally``.
    ``encoding``: a constant plane that ``encode`` takes after the tokens. Attention reads it too (static scales) or not (thresholds);
        planes that attention does not read come after the other constant ones.
    ``exact_first``: holds a row's first tokens in full precision, or the position of its first token. ``keep_first`` writes it, no append
        takes it. Only attention's own planes come after it.
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
    exact_first: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields from a pickle, in which version 0.1 calls ``exact_first`` ``early``."""
        vars(self).update(("exact_first" if name == "early" else name, value) for name, value in state.items())

    def shape(self, pages: Any, batch: Any, heads: Any) -> tuple[Any, Any, Any, int, int]:
        """Return the shape to allocate for ``pages`` pages, [N, B, K, rows, width].

        N is 0 for planes whose size the store decides itself.
        """
        n = pages if self.extent is Extent.TOKENS else 0 if self.extent is Extent.STORE else 1
        return self.shape_of(n, batch, heads)

    def shape_of(self, n: Any, batch: Any, heads: Any) -> tuple[Any, Any, Any, int, int]:
        """Return the shape [n, B, K, rows, width]: B is 1 if pooled or of extent BATCH, else ``batch``; K is 1 if shared."""
        return (n, 1 if self.pooled or self.extent is Extent.BATCH else batch, 1 if self.shared else heads, self.rows, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of one page, one head and one batch row; of the whole plane per head if it does not grow."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes per page of tokens, for one head and one batch row; 0 if the plane does not grow with tokens."""
        return self.nbytes if self.extent is Extent.TOKENS else 0


@dataclass(frozen=True)
class Layout:
    """The planes of one encoded slot, in order: planes that ``encode`` returns, planes that do not grow, planes that attention writes."""

    planes: tuple[PlaneSpec, ...]

    @property
    def encoded(self) -> int:
        """Number of planes that ``encode`` returns: those that grow with tokens, except the ones that only attention writes."""
        return sum(plane.extent is Extent.TOKENS and not plane.tally for plane in self.planes)

    @property
    def written(self) -> int:
        """Number of leading planes that an append takes: the encoded ones, or, with a window, all but ``tally``, ``exact_first`` ones."""
        return sum(not (plane.tally or plane.exact_first) for plane in self.planes) if self.is_windowed else self.encoded

    @property
    def is_windowed(self) -> bool:
        """Whether the newest tokens stay in full precision."""
        return any(plane.name == "window" for plane in self.planes)

    @property
    def first(self) -> int | None:
        """Index of the plane with the position where the planes that grow begin; None if they begin at position 0."""
        return next((index for index, plane in enumerate(self.planes) if plane.first), None)

    @property
    def ordered(self) -> bool:
        """Whether the layout needs tokens in order: some plane neither grows with tokens nor is constant: a window, planes from queries."""
        return any(plane.extent is not Extent.TOKENS and not plane.constant for plane in self.planes)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of all planes per page of tokens, for one head and one batch row."""
        return sum(plane.bytes_per_page for plane in self.planes)

    @property
    def bytes_per_row(self) -> int:
        """Bytes per head and batch row that do not depend on the length: windows."""
        return sum(plane.nbytes for plane in self.planes if plane.extent is Extent.ROW and not plane.shared)

    @property
    def bytes_per_head(self) -> int:
        """Bytes per head that depend neither on the length nor on the batch: codebooks, shared subspaces."""
        return sum(plane.nbytes for plane in self.planes if plane.extent is Extent.BATCH and not plane.shared)

    def windowed(self, slot: SlotSpec, window: int) -> Layout:
        """Return the layout with the newest ``window`` tokens in full precision and a clock: the token count and origin of each row.

        Unchanged for a window of 0.
        """
        if not window:
            return self
        grown, fixed = self.planes[: self.encoded], self.planes[self.encoded :]
        constant = tuple(plane for plane in fixed if plane.constant)
        own = tuple(plane for plane in fixed if plane.name not in {"window", "clock"} and not plane.constant)
        added = PlaneSpec("window", slot.dtype, slot.head_dim, window, Extent.ROW), PlaneSpec("clock", torch.int64, 2, 1, Extent.ROW)
        return Layout((*grown, *constant, *added, *own))

    def with_sinks(self, slot: SlotSpec, count: int) -> Layout:
        """Return the layout with a plane of each row's first ``count`` tokens in full precision.

        Without a clock, another plane holds the position of the first one.
        """
        others = tuple(plane for plane in self.planes if not plane.exact_first)
        if not count:
            return Layout(others)
        rows = PlaneSpec("sinks", slot.dtype, slot.head_dim, count, Extent.ROW, exact_first=True)
        origin = PlaneSpec("origin", torch.int64, 1, 1, Extent.ROW, shared=True, exact_first=True)
        kept, own = (tuple(plane for plane in others if plane.tally is tally) for tally in (False, True))
        return Layout((*kept, rows, *(() if self.is_windowed else (origin,)), *own))

    def nbytes(self, pages: Any, batch: Any, heads: Any) -> Any:
        """Return the bytes of all planes for ``pages`` pages, ``batch`` rows and ``heads`` kv heads.

        Planes that the store sizes itself are not counted. The arguments are ints or sympy expressions. Announced, planned and allocated
        bytes all come from this formula.
        """
        shared = sum(math.prod(plane.shape(pages, batch, heads)) * plane.dtype.itemsize for plane in self.planes if plane.shared)
        return heads * (batch * (pages * self.bytes_per_page + self.bytes_per_row) + self.bytes_per_head) + shared

    def bytes_per_token(self, heads: int) -> float:
        """Return the bytes of one token of one batch row over ``heads`` kv heads."""
        return heads * self.bytes_per_page / PAGE


@dataclass(frozen=True)
class KernelFormat:
    """The format in which a kernel reads one encoded slot: the scheme's part of the attend template.

    Channel ``c`` of a token is in word ``c % (D // parts)``, as part ``c // (D // parts)``: parts are planar, so sub-dot ``i`` takes part
    ``i`` of every word and neither queries nor values are shuffled. A channel's value is ``unpack(word, part) * scale (+ zero)``.
    ``word_dtype``: dtype of a stored word. ``parts``: codes per word.
    ``group``, ``block``: one scale covers ``group`` consecutive channels (D: the whole head) of ``block`` consecutive tokens; a page has
        PAGE / block rows of scales.
    ``scaled``: False if the codes are the values (dense).
    ``unpack(words, part)``: eager definition, ``word_dtype`` -> float32 before scaling. Templates print the expression that it traces to.
    ``zeros``: a plane of zero points follows the scales, in their layout.
    ``levels``: if not 0, ``unpack`` returns indices into a table with this many entries per kv head and ``group`` of channels. The table is
        the last plane that a kernel reads, [1, 1, K, D // group, levels]; the value is ``table[index] * scale (+ zero)``.
    ``segments``: if above 1, a word is this many bytes, lowest first, byte i from the i-th of equal segments of the row; ``unpack`` takes
        it as ``whole_dtype``.
    ``static``: no scales per token; the value is ``unpack(word, part)`` times one float32 scale per kv head, the last plane that a kernel
        reads, [1, 1, K, 1, 1]. NaN is then a code.
    ``norms``: a plane of one factor per token follows the zero points, [N, B, K, page, 1]; the value is multiplied by it.
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
        """Number of planes that a kernel reads: words, then, if present, scales, zero points, norms, and a table or static scales."""
        return self.norms_at + self.norms + self.ends_constant

    @property
    def norms_at(self) -> int:
        """Index of the plane of norms, if the format has one."""
        return 1 + self.scaled + self.zeros

    @property
    def coded(self) -> bool:
        """Whether words are codes with scales, per token or static; otherwise words are the values."""
        return self.scaled or self.static

    @property
    def ends_constant(self) -> bool:
        """Whether the last plane that a kernel reads is constant: a table, or static scales."""
        return bool(self.levels) or self.static

    @property
    def whole_dtype(self) -> torch.dtype:
        """Dtype of a word assembled from its segments: int32, or int64 for more than four bytes."""
        return torch.int64 if self.segments > 4 else torch.int32

    @property
    def symmetric(self) -> bool:
        """Whether one multiplication by a scale of the same token decodes a channel."""
        return self.block == 1 and not self.zeros and not self.levels and not self.norms and self.segments == 1


@dataclass(frozen=True)
class Static:
    """Encoding by given scales, for kernels: one plane of one-byte codes; scales [1, 1, K, 1, 1] are passed with the tokens.

    code = rne(clamp(x / scale)) with magnitudes up to ``largest``: two's complement, -128 if x is not finite; or e4m3 and its NaN.
    """

    largest: float
    e4m3: bool


@dataclass(frozen=True)
class MinMax:
    """Encoding by minimum and maximum, for kernels: planes codes, scales, zeros; groups as in ``KernelFormat``.

    ``subblock``: if not 0, that many channels are encoded at a time, and their errors, times the last plane [1, 1 or B, K, D, D] float32,
        are added to the channels after them; a group whose error is not finite adds nothing.
    ``norms``: tokens are divided by half the root mean square of their channels, which a plane after the zero points holds
        (``extensions.squat.normed``); ``subblock`` is 0 then.
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
    """Encoding by the largest magnitude, for kernels: planes codes, scales; groups of channels as in ``KernelFormat``.

    code = rne(clamp(x / scale)) with magnitudes up to ``largest``: two's complement if one part fills a byte, else offset by half of the
    range; or e4m3.
    """

    bits: int
    parts: int
    group: int
    largest: float
    e4m3: bool


@dataclass(frozen=True)
class Bins:
    """Encoding by minimum, step and thresholds, for kernels: planes codes, scales, zeros; groups as in ``KernelFormat``.

    code = how many of the 2^bits - 1 thresholds of the group's table are at most (x - zero) / scale. The thresholds, float32 [1, 1, K, D //
    group, 2^bits - 1], are passed with the tokens.
    """

    bits: int
    parts: int
    segments: int
    group: int


@dataclass(frozen=True)
class Cells:
    """Encoding by constant edges between levels, for kernels: planes codes, scales; groups and words as in ``KernelFormat``.

    code = how many of the ``edges`` lie below x / scale, 0 where the scale is NaN. The scale is the group's largest magnitude over
    ``largest`` or, with None, half the root mean square of its channels.
    """

    bits: int
    parts: int
    segments: int
    group: int
    edges: tuple[float, ...]
    largest: float | None


NUMBERS = frozenset({"item", "_local_scalar_dense"})
"""Operators and methods that return the value of a one-element tensor as a number."""
QUERY_ROWS = "kvcompile_query_rows"
"""Key in the metadata of a rewritten attention node: rows of queries per kv head."""

QUERY_GROUP = "kvcompile_query_group"
"""Key in the same metadata: query heads per kv head."""

BESIDE = "kvcompile_beside"
"""Key in the same metadata, set on each further attention that a site became: over learned tokens, or over some of its heads."""


def pages_for(tokens: int) -> int:
    """Return the number of whole pages that hold ``tokens`` tokens."""
    return math.ceil(tokens / PAGE)
