"""BlockLayout: the number of bytes of one block of one head, and where each plane lies in them, computed from schemes and sizes.

A pool is uint8 [blocks, K, bytes]. A block of one head holds ``page`` tokens: all planes of its keys, then all planes of its values. Each
plane is ``page`` rows of its width, and begins at a multiple of ``ALIGNMENT`` bytes. A block can be decoded without other blocks, with the
constant planes that all blocks of a pool share; so blocks can be shared, copied and moved as bytes.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from kvcompile.errors import BadBlock, NotPaged
from kvcompile.schemes import Scheme, parse
from kvcompile.types import Extent, PlaneSpec, Role, SlotSpec

ALIGNMENT = 16
"""Alignment of a plane's first byte in a block, in bytes: the widest load of a GPU."""
LEAST_PAGE, MOST_PAGE = 16, 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class PlanePlace:
    """The place of one plane in a block of one head: the offset of its first byte, and the dtype and width of its rows."""

    offset: int
    dtype: torch.dtype
    width: int


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The layout of one block in memory: ``page`` tokens of ``heads`` kv heads, keys of ``head_dim`` and values of ``value_dim`` channels.

    Raises NotPaged for schemes in which a token's codes depend on anything but that token, BadBlock for sizes that no pool may have, and
    the scheme's own error for head dims that it cannot hold.
    """

    keys: Scheme
    values: Scheme
    heads: int
    head_dim: int
    value_dim: int
    page: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if type(self.page) is not int or not LEAST_PAGE <= self.page <= MOST_PAGE:
            raise BadBlock(what="page", expected=f"a whole number of tokens from {LEAST_PAGE} to {MOST_PAGE}", found=self.page)
        for what, size in (("heads", self.heads), ("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if type(size) is not int or size < 1:
                raise BadBlock(what=what, expected="a whole number above 0", found=size)
        if self.dtype not in DTYPES:
            raise BadBlock(what="dtype", expected="float16, bfloat16 or float32", found=self.dtype)
        for scheme, slot in ((self.keys, self.key_slot), (self.values, self.value_slot)):
            require_alone(scheme, slot)
            scheme.check(slot)
        self.keys.check_pair(self.keys, self.values, False, "(a pool)")
        self.values.check_pair(self.keys, self.values, False, "(a pool)")

    @staticmethod
    def of(
        scheme: Scheme | str, heads: int, head_dim: int, *, values: Scheme | str | None = None, value_dim: int | None = None,
        page: int = LEAST_PAGE, dtype: torch.dtype = torch.bfloat16,
    ) -> BlockLayout:
        """Return the layout of blocks of ``page`` tokens for ``scheme``, or for ``scheme`` for keys and ``values`` for values.

        The schemes are objects or texts. ``value_dim``: channels of a value, None for ``head_dim``; ``dtype``: the model's dtype. Raises a
        SchemeError for a text that is not a scheme, and the errors of ``BlockLayout``.
        """
        given = (scheme, scheme if values is None else values)
        key, value = (parse(each) if isinstance(each, str) else each for each in given)
        return BlockLayout(
            key.for_role(Role.KEY), value.for_role(Role.VALUE), heads, head_dim, head_dim if value_dim is None else value_dim, page, dtype
        )

    @functools.cached_property
    def key_slot(self) -> SlotSpec:
        """The ``SlotSpec`` of the keys, an argument of their scheme's methods."""
        return SlotSpec(self.heads, self.head_dim, self.dtype, Role.KEY)

    @functools.cached_property
    def value_slot(self) -> SlotSpec:
        """The ``SlotSpec`` of the values, an argument of their scheme's methods."""
        return SlotSpec(self.heads, self.value_dim, self.dtype, Role.VALUE)

    def of_role(self, role: Role) -> tuple[Scheme, SlotSpec]:
        """Return the scheme and the slot of the keys or of the values."""
        return (self.keys, self.key_slot) if role is Role.KEY else (self.values, self.value_slot)

    def tables(self, device: torch.device | None) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the constant planes of the keys' scheme, and of the values' scheme, on ``device``.

        Raises the scheme's error if it needs learned tables or measured scales and has none.
        """
        keys, values = (tuple(constant_planes(*self.of_role(role), device)) for role in (Role.KEY, Role.VALUE))
        return keys, values

    @functools.cached_property
    def key_planes(self) -> tuple[PlanePlace, ...]:
        """The places of the keys' planes in a block, in the order in which ``encode`` returns the planes."""
        return _placed(grown(self.keys, self.key_slot), 0, self.page)

    @functools.cached_property
    def value_planes(self) -> tuple[PlanePlace, ...]:
        """The places of the values' planes in a block, in the order in which ``encode`` returns the planes."""
        return _placed(grown(self.values, self.value_slot), _end(self.key_planes, self.page), self.page)

    @property
    def head_bytes(self) -> int:
        """Bytes of one block of one head."""
        return _end(self.value_planes, self.page)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all heads."""
        return self.heads * self.head_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of one token over all heads, keys and values, padding for alignment included."""
        return self.block_bytes / self.page

    @property
    def name(self) -> str:
        """A text that is equal for layouts whose blocks can be exchanged as bytes; part of names of dtypes and of hashes of prefixes."""
        return self._text(self.keys.display_name(), self.values.display_name())

    @property
    def text(self) -> str:
        """The layout as text, from which ``layout_of`` makes it again; it does not contain learned tables and measured scales."""
        return self._text(self.keys.spec(), self.values.spec())

    def _text(self, keys: str, values: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{keys}|{values}|{self.heads}|{self.head_dim}|{self.value_dim}|{self.page}|{dtype}"

    def planes(self, pool: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the planes of keys and of values as views [blocks, K, page, width] of a pool, uint8 [blocks, K, bytes]."""
        return (
            tuple(self._view(pool, place) for place in self.key_planes), tuple(self._view(pool, place) for place in self.value_planes),
        )

    def _view(self, pool: torch.Tensor, place: PlanePlace) -> torch.Tensor:
        nbytes = self.page * place.width * place.dtype.itemsize
        return pool[..., place.offset : place.offset + nbytes].view(place.dtype).unflatten(-1, (self.page, place.width))

    def require_pool(self, pool: torch.Tensor) -> None:
        """Raise BadBlock unless ``pool`` is uint8 [blocks, K, bytes] with contiguous bytes whose strides keep planes aligned."""
        fits = pool.dtype == torch.uint8 and pool.dim() == 3 and tuple(pool.shape[1:]) == (self.heads, self.head_bytes)
        if not fits or pool.stride(2) != 1 or pool.stride(0) % ALIGNMENT or pool.stride(1) % ALIGNMENT:
            expected = f"uint8 [blocks, {self.heads}, {self.head_bytes}] with contiguous bytes and strides of whole {ALIGNMENT}"
            raise BadBlock(what="pool", expected=expected, found=f"{pool.dtype} {list(pool.shape)} with strides {pool.stride()}")


@functools.lru_cache(maxsize=256)
def layout_of(text: str) -> BlockLayout:
    """Return the layout whose ``BlockLayout.text`` is ``text``; cached."""
    keys, values, heads, head_dim, value_dim, page, dtype = text.split("|")
    kind: torch.dtype = getattr(torch, dtype)
    return BlockLayout(parse(keys), parse(values), int(heads), int(head_dim), int(value_dim), int(page), kind)


def token_line(keys: Scheme, values: Scheme, token: float, layers: int | None = None) -> str:
    """Return the beginning of an engine's start line: schemes, bytes of a token, and the number of layers unless it is None."""
    where = "" if layers is None else f" in {layers} layers"
    return f"{keys.display_name()} keys, {values.display_name()} values, {token:,.0f} bytes a token{where}"


def capacity(tokens: int, nbytes: int, dense: int, dtype: torch.dtype) -> str:
    """Return a text for an engine's log line: that ``tokens`` tokens fit in ``nbytes``, and how many dense tokens of ``dense`` bytes would.

    ``dtype``: the dtype of the dense tokens.
    """
    return f"{tokens:,} tokens in {nbytes / 2**20:,.0f} MiB ({str(dtype).removeprefix('torch.')}: {nbytes // dense:,})"


def grown(scheme: Scheme, slot: SlotSpec) -> tuple[PlaneSpec, ...]:
    """Return the specs of the planes that ``encode`` returns, which grow with tokens."""
    layout = scheme.layout(slot)
    return layout.planes[: layout.encoded]


def constant_planes(scheme: Scheme, slot: SlotSpec, device: torch.device | None = None) -> list[torch.Tensor]:
    """Return the constant planes of a scheme, [1, 1, K, rows, width] each, in the layout's order: levels, thresholds, static scales."""
    return [scheme.empty(plane, slot, 1, 1, device) for plane in scheme.layout(slot).planes if plane.constant]


def require_alone(scheme: Scheme, slot: SlotSpec) -> None:
    """Raise NotPaged unless a token's codes depend on that token alone, lie in its own row of a block, and plain attention reads them."""
    layout, rotation = scheme.layout(slot), scheme.rotation(slot)
    reasons = (
        (scheme.attention != Scheme.attention, f"its attention is an operation of its own, {scheme.attention!r}"),
        (not scheme.by_token, "tokens are encoded together, so a code depends on its neighbours"),
        (bool(scheme.window), "its newest tokens stay exact in a window of each row, which a block does not hold"),
        (bool(scheme.sinks), "its first tokens stay exact in a plane of each row, which a block does not hold"),
        (bool(scheme.calibrated), "it is calibrated on the queries of a request, and blocks are shared between requests"),
        (bool(scheme.pre_rope), "its keys are stored before RoPE, which an engine has applied already"),
        (rotation is not None and rotation.plane is not None, "its rotation depends on a request"),
        (
            any(plane.extent is not Extent.TOKENS and not plane.constant for plane in layout.planes) or layout.first is not None,
            "it keeps planes by row, which a block does not hold",
        ),
        (any(plane.host or plane.pooled or plane.tally for plane in layout.planes), "its planes lie elsewhere than in a block"),
    )
    for applies, reason in reasons:
        if applies:
            raise NotPaged(scheme=scheme.spec(), reason=reason)


def _placed(planes: tuple[PlaneSpec, ...], start: int, page: int) -> tuple[PlanePlace, ...]:
    """Return the places of ``planes`` in a block, one after another from byte ``start`` on."""
    found: list[PlanePlace] = []
    for plane in planes:
        found.append(PlanePlace(_end(tuple(found), page) if found else start, plane.dtype, plane.width))
    return tuple(found)


def _end(places: tuple[PlanePlace, ...], page: int) -> int:
    """Return the offset in bytes behind the last of ``places``, rounded up to ``ALIGNMENT``; ``page``: the number of rows of a plane."""
    last = places[-1]
    nbytes = page * last.width * last.dtype.itemsize
    return -(-(last.offset + nbytes) // ALIGNMENT) * ALIGNMENT
