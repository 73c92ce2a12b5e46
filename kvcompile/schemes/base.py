"""The base of all schemes: a frozen dataclass whose fields are its options, pure functions, no state.

``encode`` and ``decode`` are the only definition of the numerics. They are the oracle of the tests,
the CPU path, and, through ``format().unpack``, the source of the kernels' expressions: ``decode`` is
written on that same ``unpack``, so the two cannot drift apart.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import BadOption, HalvesDiffer, HeadDimNotDivisible, LatentNotHeld
from kvcompile.schemes.rotation import Rotation
from kvcompile.types import AbsMax, Bins, KernelFormat, Layout, MinMax, PlaneSpec, Role, SlotSpec, Static

Planes = tuple[torch.Tensor, ...]

DATA = {"option": False}
"""The metadata of a scheme's field that is data and no option: not part of its text, and passed to kernels as planes."""

QUIET = {"quiet": True}
"""The metadata of an option that is left out of a scheme's text where it has its default."""

AMAX = sympy.Symbol("amax", nonnegative=True)
"""The largest magnitude in the group that one scale covers."""

SPREAD = sympy.Symbol("spread", nonnegative=True)
"""The largest less the smallest value of that group."""

NORM = sympy.Symbol("norm", nonnegative=True)
"""What a token was divided by before its group was looked at, where a format has ``norms``."""


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """How one slot is encoded. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str]
    window = 0
    """How many of the newest tokens stay in full precision, in a plane named ``window``; an option of schemes with blocks."""
    sinks = 0
    """How many of a row's first tokens stay in full precision, in a plane named ``sinks``; an option."""
    calibrated: ClassVar[frozenset[str]] = frozenset()
    """Names of the fixed planes that ``calibrate`` makes."""
    uncalibrated: ClassVar[str] = ""
    """The words of a warning about a cache whose planes ``calibrate`` never made: how its keys are then encoded."""
    pre_rope = False
    """Whether keys are stored as they are before their rotary embedding, which attention then applies; an option."""
    calibrates_before_rope = False
    """Whether ``calibrate`` takes queries as they are before their rotary embedding, where keys are stored so."""
    attention: ClassVar[str] = "attend"
    """The operation in ``torch.ops.kvcompile`` that attends over a store of this scheme; keys and values of a site name the same one."""
    attention_writes: ClassVar[tuple[str, ...]] = ()
    """Names of the planes of keys that this operation writes; the rewrite passes them behind the operands of ``attend``, None for one
    that a layout has not."""
    attention_writes_values: ClassVar[tuple[str, ...]] = ()
    """Names of the planes of values that it writes, which follow those."""
    kernels: ClassVar[str | None] = None
    """The module that defines this operation and brings its kernels (``lowering.attention_plugins``), where it is not ``attend``."""
    append_kernel: ClassVar[str | None] = None
    """The module whose ``APPEND`` (``lowering.attention_plugins.AppendKernel``) encodes tokens on CUDA by a constant plane, such as
    tables of thresholds, or scales; None where the eager body is compiled."""
    kernel_encoding: ClassVar[bool] = False
    """Whether kernels may encode as ``absmax`` or ``minmax`` says. Said by every class for itself: what a subclass encodes is its own."""
    in_order: ClassVar[bool] = False
    """Whether its stores take tokens in their order only, as those with a window do: what lies behind the last one is forgotten."""
    devices: ClassVar[tuple[str, ...] | None] = None
    """The devices that its attention runs on, None for all."""
    exact: ClassVar[bool] = False
    """Whether ``decode`` returns what was encoded."""
    error_feedback_plane: ClassVar[str | None] = None
    """The plane of keys [D, D] by whose row i the error of channel i was added to other channels before they were encoded; ``radius`` then
    bounds the error of a channel's codes alone."""
    prefill_reads_codes: ClassVar[bool] = False
    """Whether attention of a call that fills an empty cache, too, reads what the codes of its tokens stand for, as decode steps do."""
    source: ClassVar[str] = ""
    warning: ClassVar[str | None] = None

    @abc.abstractmethod
    def layout(self, slot: SlotSpec) -> Layout:
        """The planes of an encoded slot and so its bytes."""

    @abc.abstractmethod
    def format(self, slot: SlotSpec) -> KernelFormat:
        """How a kernel reads the planes."""

    @abc.abstractmethod
    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        """Codes and scales of new tokens, one [B, K, S or S / block, width] tensor a plane. NaN and Inf never become finite.

        ``fixed``: the layout's ``encoding`` planes, then those that ``calibrate`` fills. S is a multiple of ``block``, and the tokens
        are consecutive.
        """

    def spoiled(self, heads: int, head_dim: int, device: torch.device | None = None) -> Planes:
        """The codes of one token that is not there, [1, K, 1, width] a plane: they decode to NaN."""
        return self.encode(torch.full((1, heads, 1, head_dim), float("nan"), device=device))

    @abc.abstractmethod
    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        """A bound on |x - decode(encode(x))| of one channel, in terms of ``AMAX`` and ``SPREAD`` of its group, and of its token's ``NORM``.

        None where none holds.
        """

    def planes_read(self, slot: SlotSpec) -> int:
        """How many of the planes attention reads, the first ones; more than a kernel decodes where originals are among them."""
        return self.format(slot).planes

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        """Bound the error by what is stored: ``bounds.STEP``, a channel's scale, and ``bounds.ZERO``, the magnitude of its zero point."""
        del slot
        return None

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        """The settings that every test of all schemes runs with: the default, then one per option that matters."""
        return (cls(),)

    @classmethod
    def named(cls) -> dict[str, dict[str, object]]:
        """Settings that a source gives a name of its own, which begins with the scheme's and a hyphen, by that name: their options."""
        return {}

    @property
    def by_token(self) -> bool:
        """Whether a token's codes depend on that token of its own head alone, however many are written with it."""
        return self.block == 1

    @property
    def position_independent(self) -> bool:
        """Whether a token's codes mean the same wherever they lie in a store, whatever lies beside them."""
        return self.by_token and not self.window and not self.sinks and not self.calibrated and not self.pre_rope

    @property
    def keeps_padding_out(self) -> bool:
        """Whether other tokens set a token's scale, so that the write path must keep padding out of it."""
        return bool(self.window) or not self.by_token

    @property
    def block(self) -> int:
        """How many consecutive tokens are encoded together, once all of them are there; divides ``window``."""
        return 1

    def minmax(self, head_dim: int) -> MinMax | None:
        """How a kernel may encode rows of ``head_dim`` channels in place of ``encode``, bit for bit; None where it may not."""
        del head_dim
        return None

    def absmax(self, head_dim: int) -> AbsMax | None:
        """How a kernel may encode rows of ``head_dim`` channels in place of ``encode`` where there are no zero points and no blocks."""
        del head_dim
        return None

    def bins(self, head_dim: int) -> Bins | None:
        """How a kernel may encode rows of ``head_dim`` channels in place of ``encode`` where thresholds are given."""
        del head_dim
        return None

    def static(self, head_dim: int) -> Static | None:
        """How a kernel may encode rows of ``head_dim`` channels in place of ``encode`` where scales are given."""
        del head_dim
        return None

    @property
    def in_kernels(self) -> bool:
        """Whether this very class, and not one that it derives from, says that kernels may encode."""
        return bool(vars(type(self)).get("kernel_encoding", False))

    def rotation(self, slot: SlotSpec) -> Rotation | None:
        """The rotation of channels that a slot's tokens are stored in; None where they are stored as they are.

        ``encode``, ``decode`` and the bounds are of rotated channels. Whoever hands tokens to a store or reads them rotates them, and
        whoever attends rotates its queries and results (``schemes.rotation``).
        """
        del slot
        return None

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        """Contents of the layout's constant planes by name, each broadcast to its plane's [K, rows, width]."""
        del slot
        return {}

    def empty(self, plane: PlaneSpec, slot: SlotSpec, pages: int, batch: int, device: torch.device | None = None) -> torch.Tensor:
        """One plane of an empty store, [N, B, K, rows, width]: zeros, or what ``constants`` says of it."""
        made = torch.zeros(plane.shape(pages, batch, slot.heads), dtype=plane.dtype, device=device)
        return made.copy_(self.constants(slot)[plane.name]) if plane.constant else made

    def calibrates(self, slot: SlotSpec) -> bool:
        """Whether its fixed planes come out of ``calibrate``, from the queries of the call that fills an empty cache."""
        del slot
        return False

    def calibrate(self, q_BKGSD: torch.Tensor, keep_BS: torch.Tensor | None) -> Planes:
        """The fixed planes, in the layout's order, from queries; ``keep``: which tokens are no padding, all where None."""
        raise NotImplementedError(f"{self.name} is not calibrated")

    def for_module(self, path: str) -> Scheme:
        """The scheme of the attention at a module path, where layers have tables of their own; raises a SchemeError where it has none."""
        del path
        return self

    def for_role(self, role: Role) -> Scheme:
        """The scheme that holds slots of this role, where keys and values are encoded differently."""
        del role
        return self

    @property
    def largest(self) -> float:
        """The largest magnitude that ``bound`` speaks of; a group beyond it may decode to NaN or Inf, never to a wrong number."""
        return math.inf

    def check(self, slot: SlotSpec) -> None:
        """Raise a SchemeError where this scheme cannot hold the slot."""
        del slot

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        """Raise a SchemeError where attention cannot have these schemes for its two halves, one of which is this one.

        ``latent``: keys and values are made from a cached latent. ``path``: the module path, for the message.
        """
        if keys.attention != values.attention:
            raise HalvesDiffer(scheme=self.name, keys=keys.spec(), values=values.spec(), path=path)
        if latent and self.attention != Scheme.attention:
            raise LatentNotHeld(scheme=self.name, path=path)

    def check_site(self, keys: SlotSpec, values: SlotSpec, layer: int) -> None:
        """Raise a SchemeError where attention of a layer, by its number, cannot have this scheme for keys and values of these slots."""
        del keys, values, layer

    def certifying(self, certify: str) -> Scheme | None:
        """Return the scheme with this policy for its attention's certificate, None where its attention has none."""
        del certify
        return None

    def decode(self, planes: Planes, slot: SlotSpec) -> torch.Tensor:
        """The values that the codes stand for, float32 [..., S, D], from planes [..., S, width].

        ``planes``: all that attention reads, or what ``encode`` returned, where tables are constant.
        """
        fmt = self.format(slot)
        values = unpacked(planes[0], fmt)
        if fmt.levels:
            # [1, 1, K, D // group, levels] -> [K, D, levels]: each channel looks its code up in the table of its group.
            table = self._table(planes, slot, fmt)[0, 0].to(torch.float32).repeat_interleave(fmt.group, dim=-2)
            index = values.to(torch.int64).unsqueeze(-1)
            values = table.unsqueeze(-3).expand(*index.shape[:-1], -1).gather(-1, index).squeeze(-1)
        if fmt.static:
            # [1, 1, K, 1, 1] -> [K, 1, 1]
            return values * self._table(planes, slot, fmt)[0, 0].to(torch.float32)
        if not fmt.scaled:
            return values
        values = values * _spread(planes[1], fmt)
        values = values + _spread(planes[2], fmt) if fmt.zeros else values
        return values * planes[fmt.norms_at].to(torch.float32) if fmt.norms else values

    def _table(self, planes: Planes, slot: SlotSpec, fmt: KernelFormat) -> torch.Tensor:
        """The plane of tables, [1, 1, K, D // group, levels], or of static scales, [1, 1, K, 1, 1]."""
        if len(planes) >= fmt.planes:
            return planes[fmt.planes - 1]
        spec = next(plane for plane in self.layout(slot).planes if plane.constant)
        return self.empty(spec, dataclasses.replace(slot, heads=planes[0].shape[-3]), 1, 1, planes[0].device)

    def bits_per_value(self, slot: SlotSpec) -> float:
        """Stored bits per original value, scales included."""
        return 8 * self.layout(slot).bytes_per_token(1) / slot.head_dim

    @classmethod
    def options(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields that are options, in their order, those that text may leave out behind the others."""
        found = (field for field in dataclasses.fields(cls) if field.metadata.get("option", True))
        return tuple(sorted(found, key=lambda field: bool(field.metadata.get("quiet"))))

    def display_name(self) -> str:
        """The scheme in an error's words: its text, and whatever sets it apart from others of that text."""
        return self.spec()

    def spec(self) -> str:
        """The scheme as text that ``schemes.parse`` reads back, e.g. ``int4(group=32)``; part of cache keys."""
        fields = []
        for field in self.options():
            value = getattr(self, field.name)
            if field.metadata.get("quiet") and value == field.default:
                continue
            if isinstance(value, torch.dtype):
                text = str(value).removeprefix("torch.")
            else:
                text = str(getattr(value, "value", value))
            fields.append(f"{field.name}={text}")
        return f"{self.name}({','.join(fields)})"


def unpacked(words: torch.Tensor, fmt: KernelFormat) -> torch.Tensor:
    """Values before scaling, float32 [..., D], of stored words [..., width]."""
    if fmt.segments > 1:
        parts = [part.to(fmt.whole_dtype) << (8 * byte) for byte, part in enumerate(words.chunk(fmt.segments, dim=-1))]
        words = functools.reduce(torch.bitwise_or, parts)
    return torch.cat([fmt.unpack(words, part) for part in range(fmt.parts)], dim=-1)


def _spread(plane: torch.Tensor, fmt: KernelFormat) -> torch.Tensor:
    """Scales or zero points [..., S // block, D // group] as float32 [..., S, D]."""
    values = plane.to(torch.float32).repeat_interleave(fmt.group, dim=-1)
    return values if fmt.block == 1 else values.repeat_interleave(fmt.block, dim=-2)


def require(condition: bool, scheme: str, option: str, expected: str, found: object, todo: str) -> None:
    """Raise BadOption unless ``condition`` holds."""
    if not condition:
        raise BadOption(scheme=scheme, option=option, expected=expected, found=found, todo=todo)


def require_divides(by: int, slot: SlotSpec, scheme: str, what: str) -> None:
    """Raise HeadDimNotDivisible unless ``by`` divides the slot's head dim."""
    if slot.head_dim % by:
        raise HeadDimNotDivisible(scheme=scheme, what=what, head_dim=slot.head_dim, by=by)
