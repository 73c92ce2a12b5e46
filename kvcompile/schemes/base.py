"""The base of all schemes: a frozen dataclass whose fields are its options, pure functions, no state.

``encode`` and ``decode`` are the only definition of the numerics. They are the oracle of the tests, the CPU path, and, through
``format().unpack``, the source of the kernels' expressions: ``decode`` calls the same ``unpack``, so the two cannot diverge.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import BadOption, HeadDimNotDivisible, LatentNotHeld, PairedSchemesDiffer
from kvcompile.schemes.rotation import Rotation
from kvcompile.types import AbsMax, Bins, Cells, KernelFormat, Layout, MinMax, PlaneSpec, Role, SlotSpec, Static

Planes = tuple[torch.Tensor, ...]

DATA = {"option": False}
"""Field metadata: data rather than an option, so it is left out of the scheme's text; kernels get it as planes."""

def optional(kind: type) -> dict[str, Any]:
    """Return field metadata for an option that is None or of ``kind``, for reading its text."""
    return {"optional": kind}


QUIET = {"quiet": True}
"""Field metadata: an option that the scheme's text leaves out if it has its default."""

AMAX = sympy.Symbol("amax", nonnegative=True)
"""The largest magnitude in the group of one scale."""

SPREAD = sympy.Symbol("spread", nonnegative=True)
"""The largest minus the smallest value of that group."""

NORM = sympy.Symbol("norm", nonnegative=True)
"""The factor that a token was divided by before grouping, if the format has ``norms``."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Further inputs of ``calibrate``, besides queries, from the call that fills an empty cache; None if the call does not give them.

    ``keys``: its new keys [B, K, S, D] as the store is to hold them. ``angles``: cos and sin [1 or B, S, Dr] at the queries' positions, and
    whether RoPE pairs neighbouring channels (``ops.operations.apply_rope``); given with queries before RoPE.
    """

    keys: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor, bool] | None = None


UNTOLD = Prompt()
"""The further inputs of ``calibrate`` for a call that gives queries alone: none."""


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """The encoding of one slot. Subclasses are frozen dataclasses whose fields are the options.

    Four members are yours to write: ``layout``, ``format``, ``encode`` and ``bound``. Three more if they apply: ``largest``, if scales
    overflow before float32 does; ``check``, for head dims that cannot be held; ``variants``, the settings that tests try. The default of
    every other member is right for a scheme that encodes each token by itself and keeps no token in full precision.

    Scales must neither overflow nor underflow the dtype that they are stored in: ``symmetric.stored_scale`` rounds them up and keeps them
    above zero. ``kvcompile.testing.conformance`` tries all that is expected of a scheme.
    """

    name: ClassVar[str]
    window = 0
    """Number of newest tokens that stay in full precision, in a plane named ``window``; an option (``schemes.windowed``)."""
    sinks = 0
    """Number of a row's first tokens that stay in full precision, in a plane named ``sinks``; an option."""
    calibrated: ClassVar[frozenset[str]] = frozenset()
    """Names of the fixed planes that ``calibrate`` computes."""
    uncalibrated: ClassVar[str] = ""
    """For a warning about a cache whose planes ``calibrate`` never computed: how its keys are encoded then."""
    pre_rope = False
    """Whether keys are stored before their rotary embedding, which attention then applies; an option."""
    calibrates_before_rope = False
    """Whether ``calibrate`` takes queries before their rotary embedding if keys are stored so."""
    calibrates_on_keys = False
    """Whether ``calibrate`` takes the call's keys as the store is to hold them; not if a plane of its own rotates them."""
    attention: ClassVar[str] = "attend"
    """The operation in ``torch.ops.kvcompile`` that attends over a store of this scheme; the same for keys and values of a site."""
    attention_writes: ClassVar[tuple[str, ...]] = ()
    """Names of the key planes that this operation writes; the rewrite passes them after the operands of ``attend``, None for a plane that
    the layout lacks."""
    attention_writes_values: ClassVar[tuple[str, ...]] = ()
    """Names of the value planes that attention writes, passed after the key planes that it writes."""
    kernels: ClassVar[str | None] = None
    """The module that defines this operation and its kernels (``lowering.attention_plugins``); None for ``attend``."""
    append_kernel: ClassVar[str | None] = None
    """The module whose ``APPEND`` (``lowering.attention_plugins.AppendKernel``) encodes tokens on CUDA by a constant plane, such as
    thresholds or scales. None: the eager body is compiled."""
    kernel_encoding: ClassVar[bool] = False
    """Whether kernels may encode by ``absmax`` or ``minmax``. Not inherited: each class sets it for its own encoding."""
    in_order: ClassVar[bool] = False
    """Whether its stores take tokens in order only, as those with a window do: a write forgets all later tokens."""
    devices: ClassVar[tuple[str, ...] | None] = None
    """The device types that its attention runs on; None for all."""
    exact: ClassVar[bool] = False
    """Whether ``decode`` returns exactly the encoded values."""
    error_feedback_plane: ClassVar[str | None] = None
    """Name of the key plane [D, D] whose row i says how the error of channel i was added to other channels before they were encoded;
    ``radius`` then bounds the error of a channel's codes alone. None: no error feedback."""
    prefill_reads_codes: ClassVar[bool] = False
    """Whether attention of a call that fills an empty cache reads its tokens dequantized, as decode steps do, rather than in full
    precision."""
    source: ClassVar[str] = ""
    warning: ClassVar[str | None] = None
    renamed: ClassVar[Mapping[str, str]] = {}
    """Former names of options, with the present ones: texts and pickles of version 0.1 have them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the options from a pickle, of this version or an earlier one."""
        vars(self).update(self.written_before(state))

    def __post_init__(self) -> None:  # noqa: B027 - a scheme without options checks nothing
        """Raise a SchemeError if an option has a value that the scheme does not take."""

    @abc.abstractmethod
    def layout(self, slot: SlotSpec) -> Layout:
        """Return the planes of an encoded slot, and so its bytes."""

    @abc.abstractmethod
    def format(self, slot: SlotSpec) -> KernelFormat:
        """Return how a kernel reads the planes."""

    @abc.abstractmethod
    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        """Return codes and scales of new tokens, one [B, K, S or S / block, width] tensor per plane. NaN and Inf never become finite.

        ``fixed``: the layout's ``encoding`` planes, then those that ``calibrate`` fills. S is a multiple of ``block``, and the tokens are
            consecutive.
        """

    def spoiled(self, heads: int, head_dim: int, device: torch.device | None = None) -> Planes:
        """Return codes and scales that decode to NaN, one tensor [1, K, 1, width] per plane, for a token that does not exist.

        Readers use them for an index out of range. Only for schemes that encode each token by itself (``block`` 1).
        """
        return self.encode(torch.full((1, heads, 1, head_dim), float("nan"), device=device))

    @abc.abstractmethod
    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        """Return a bound on |x - decode(encode(x))| of one channel, in ``AMAX`` and ``SPREAD`` of its group and ``NORM`` of its token.

        None if there is no such bound.
        """

    def planes_read(self, slot: SlotSpec) -> int:
        """Return the number of leading planes that attention reads.

        It exceeds the number that a kernel decodes if full-precision planes are among them.
        """
        return self.format(slot).planes

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        """Return a bound on a channel's error as an expression in stored numbers; None if there is none.

        Its symbols are ``bounds.STEP``, the channel's scale, and ``bounds.ZERO``, the magnitude of its zero point.
        """
        del slot
        return None

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        """Return the settings that every test of all schemes runs with: the default, then one per option that matters."""
        return (cls(),)

    @classmethod
    def written_before(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the options of a scheme's text or pickle, of this version or an earlier one, by the names that they have now.

        Options that the earlier version left out have the defaults of that version.
        """
        return {cls.renamed.get(name, name): value for name, value in options.items()}

    @classmethod
    def named(cls) -> dict[str, dict[str, object]]:
        """Return the scheme's named settings, such as those of its paper's tables, as {name: options}.

        Each name begins with the scheme's name and a hyphen.
        """
        return {}

    @property
    def by_token(self) -> bool:
        """Whether a token's codes and scales depend only on that token of that head, not on other tokens of the write."""
        return self.block == 1

    @property
    def position_independent(self) -> bool:
        """Whether a token's codes and scales keep their meaning when copied to any other index of a store."""
        return self.by_token and not self.window and not self.sinks and not self.calibrated and not self.pre_rope

    @property
    def keeps_padding_out(self) -> bool:
        """Whether other tokens influence a token's scale, so that the write path must exclude padding."""
        return bool(self.window) or not self.by_token

    @property
    def block(self) -> int:
        """Number of consecutive tokens encoded together, once all of them are there; divides ``window``."""
        return 1

    def minmax(self, head_dim: int) -> MinMax | None:
        """Return the rule by which a kernel encodes rows of ``head_dim`` channels as ``encode``, bit for bit; None if no kernel may."""
        del head_dim
        return None

    def absmax(self, head_dim: int) -> AbsMax | None:
        """Return the rule by which a kernel encodes rows of ``head_dim`` channels by largest magnitudes; None if no kernel may.

        Schemes with a rule have neither zero points nor blocks.
        """
        del head_dim
        return None

    def bins(self, head_dim: int) -> Bins | None:
        """Return the rule by which a kernel encodes rows of ``head_dim`` channels by thresholds in a plane; None if no kernel may."""
        del head_dim
        return None

    def static(self, head_dim: int) -> Static | None:
        """Return the rule by which a kernel encodes rows of ``head_dim`` channels by scales in a plane; None if no kernel may."""
        del head_dim
        return None

    def cells(self, head_dim: int) -> Cells | None:
        """Return the constant edges by which a kernel may encode rows of ``head_dim`` channels, as ``Cells``; None if no kernel may."""
        del head_dim
        return None

    @property
    def in_kernels(self) -> bool:
        """Return whether kernels may encode for exactly this class; a class that derives from it must set ``kernel_encoding`` itself."""
        return bool(vars(type(self)).get("kernel_encoding", False))

    def rotation(self, slot: SlotSpec) -> Rotation | None:
        """Return the rotation of channels in which a slot's tokens are stored; None if they are not rotated.

        ``encode``, ``decode`` and the bounds work on rotated tokens. Callers rotate tokens before a store takes them and rotate them back
        after reading; attention rotates its queries and results (``schemes.rotation``).
        """
        del slot
        return None

    def constants(self, slot: SlotSpec) -> dict[str, torch.Tensor]:
        """Return the contents of the layout's constant planes by name, each broadcastable to its plane's [K, rows, width]."""
        del slot
        return {}

    def empty(self, plane: PlaneSpec, slot: SlotSpec, pages: int, batch: int, device: torch.device | None = None) -> torch.Tensor:
        """Return one plane of an empty store, [N, B, K, rows, width]: zeros, or its entry of ``constants``."""
        made = torch.zeros(plane.shape(pages, batch, slot.heads), dtype=plane.dtype, device=device)
        return made.copy_(self.constants(slot)[plane.name]) if plane.constant else made

    def calibrates(self, slot: SlotSpec) -> bool:
        """Return whether ``calibrate`` computes the slot's fixed planes, from the queries of the call that fills an empty cache."""
        del slot
        return False

    def calibrate(self, q_BKGSD: torch.Tensor, keep_BS: torch.Tensor | None, prompt: Prompt = UNTOLD) -> Planes:
        """Return the fixed planes, in the layout's order, computed from queries.

        ``keep_BS``: False for padding tokens; None if there are none.
        """
        raise NotImplementedError(f"{self.name} is not calibrated")

    def for_module(self, path: str) -> Scheme:
        """Return the scheme of the attention at a module path, with that layer's tables. Raises a SchemeError if it has none for it."""
        del path
        return self

    def for_role(self, role: Role) -> Scheme:
        """Return the scheme for slots of ``role``: another one than this if the class encodes keys and values differently."""
        del role
        return self

    @property
    def largest(self) -> float:
        """The largest magnitude for which ``bound`` holds; a group beyond it may decode to NaN or Inf, never to a wrong number."""
        return math.inf

    def check(self, slot: SlotSpec) -> None:
        """Raise a SchemeError if this scheme cannot hold the slot."""
        del slot

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        """Raise a SchemeError if one attention cannot have these schemes for its keys and values; one of the two is this scheme.

        ``latent``: keys and values are computed from a cached latent. ``path``: the module path, for the message.
        """
        if keys.attention != values.attention:
            raise PairedSchemesDiffer(scheme=self.name, keys=keys.spec(), values=values.spec(), path=path)
        if latent and self.attention != Scheme.attention:
            raise LatentNotHeld(scheme=self.name, path=path)

    def check_site(self, keys: SlotSpec, values: SlotSpec, layer: int) -> None:
        """Raise a SchemeError if the attention in layer number ``layer`` cannot have this scheme for slots ``keys`` and ``values``."""
        del keys, values, layer

    def certifying(self, certify: str) -> Scheme | None:
        """Return the scheme with this certificate policy (``Certify.spec``); None if its attention has no certificate."""
        del certify
        return None

    def decode(self, planes: Planes, slot: SlotSpec) -> torch.Tensor:
        """Return the dequantized values, float32 [..., S, D], of planes [..., S, width].

        ``planes``: all planes that attention reads; or only those that ``encode`` returned, and ``constants`` gives the tables.
        """
        fmt = self.format(slot)
        values = unpacked(planes[0], fmt)
        if fmt.levels:
            # [1, 1, K, D // group, levels] -> [K, D, levels]: a channel's code is an index into the table of its group.
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
        """Return the plane of tables, [1, 1, K, D // group, levels], or of static scales, [1, 1, K, 1, 1]."""
        if len(planes) >= fmt.planes:
            return planes[fmt.planes - 1]
        spec = next(plane for plane in self.layout(slot).planes if plane.constant)
        return self.empty(spec, dataclasses.replace(slot, heads=planes[0].shape[-3]), 1, 1, planes[0].device)

    def bits_per_value(self, slot: SlotSpec) -> float:
        """Return the stored bits per value, scales included."""
        return 8 * self.layout(slot).bytes_per_token(1) / slot.head_dim

    @classmethod
    def options(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields that are options, in order, with ``QUIET`` ones last."""
        found = (field for field in dataclasses.fields(cls) if field.metadata.get("option", True))
        return tuple(sorted(found, key=lambda field: bool(field.metadata.get("quiet"))))

    def display_name(self) -> str:
        """Return the scheme's name in error messages: its text, and any data that distinguishes it from others with the same text."""
        return self.spec()

    def spec(self) -> str:
        """Return the scheme as text that ``schemes.parse`` reads back, e.g. ``int4(group=32)``; part of cache keys."""
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
    """Return the values before scaling, float32 [..., D], of stored words [..., width]."""
    if fmt.segments > 1:
        parts = [part.to(fmt.whole_dtype) << (8 * byte) for byte, part in enumerate(words.chunk(fmt.segments, dim=-1))]
        words = functools.reduce(torch.bitwise_or, parts)
    return torch.cat([fmt.unpack(words, part) for part in range(fmt.parts)], dim=-1)


def _spread(plane: torch.Tensor, fmt: KernelFormat) -> torch.Tensor:
    """Return scales or zero points [..., S // block, D // group] repeated to float32 [..., S, D]."""
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
