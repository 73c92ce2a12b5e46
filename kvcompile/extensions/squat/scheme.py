"""squat: keys whose quantization error is kept out of the queries' subspace ("SQuat", Wang et al. 2025, sections 3 and B.2).

Values as ``kivi``. Keys per channel as ``kivi``, but ``subblock`` channels at a time: the error of the channels quantized so far is fed
back into the others, so that the whole error stays close to orthogonal to the subspace that the prompt's queries
span. A later query of that subspace then scores a quantized key nearly as the original.

* The paper takes a few leading directions of q q^T, unrotated keys and at most four sub-blocks. The default here takes the whole q q^T,
  which is the mean square of a score's error, in sub-blocks of eight, since the errors of the last one are not made up for; and
  rotates keys, so that no channel has the most energy, least of all the last ones, where slow pairs of RoPE are (docs/ACCURACY.md).
* The paper's lam multiplies squared singular values, so its strength grows with the prompt and with the model's scale. ``unit=diagonal``
  divides q q^T by its mean diagonal: lam then weighs a score's error against that of a channel for any prompt and model. ``unit=queries``
  divides by the number of queries alone. ``Squat.paper()`` is the paper's setting.
* ``guard``: a head whose scores would be off by more than without error feedback keeps none (``guard.py``); it is ``kivi`` there.
* A store keeps the products B_t H_t of the paper (``subspace.moves``), in one plane of D x D per
  head, rather than P, its inverse and every A_t: encoding needs nothing else, and it takes a quarter of their size at two
  sub-blocks and less at more. A plane of zeros feeds nothing back: lam = 0, plain ``kivi``. A store that never saw a query
  (a cache that other code filled) is therefore no special case.
* NaN or Inf in a group is not fed back, and queries that are not finite are ignored: neither may reach other channels.
* With ``pre_rope`` (the paper's SQuat-pre) a stored key meets a query rotated by its distance from the key.
  The subspace is that of queries before RoPE, as in the paper: up to that rotation it is the same at every distance, while
  queries after RoPE are rotated by their position in the prompt (``queries=post``). ``queries=distances`` averages q q^T before RoPE over
  the distances at which keys are read (``subspace.over_distances``), which alone gained nothing (docs/ACCURACY.md).
* Every write encodes full-precision keys, so a block's codes depend only on its own tokens and the plane.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import sympy
import torch

from kvcompile.errors import BadOption
from kvcompile.extensions.squat import guard as guarding
from kvcompile.extensions.squat import subspace as algebra
from kvcompile.extensions.squat.former import respelled
from kvcompile.extensions.squat.source_settings import LONGBENCH, PAPER
from kvcompile.schemes.asymmetric import Axis, Kivi, pack
from kvcompile.schemes.base import UNTOLD, Planes, Prompt, Scheme, optional, require, require_divides
from kvcompile.schemes.rotation import Rotate
from kvcompile.types import Extent, Layout, MinMax, PlaneSpec, Role, SlotSpec


class Queries(enum.Enum):
    """The form of the queries for which keys stored before RoPE are encoded.

    They are taken before RoPE, after RoPE, or rotated by every distance from a query to a key.
    """

    PRE = "pre"
    POST = "post"
    DISTANCES = "distances"


class Subspace(enum.Enum):
    """The batch rows whose queries span the subspace: the first row, for all rows of the batch, or each row for itself."""

    BATCH = "batch"
    ROW = "row"


class Unit(enum.Enum):
    """The unit of lam: the mean diagonal of q q^T, one query, or none."""

    DIAGONAL = "diagonal"
    QUERIES = "queries"
    NONE = "none"


LARGEST_LAM = 1e6
STRONG_LAM = 1e-2
"""Above this the paper's form, without a unit, only did harm in its own ablation (its Table 3)."""


def _changes(scheme: Scheme) -> dict[str, object]:
    """Return the options of a scheme that differ from its defaults."""
    return {field.name: value for field in scheme.options() if (value := getattr(scheme, field.name)) != field.default}


@dataclasses.dataclass(frozen=True)
class Squat(Kivi):
    """The scheme squat: asymmetric codes, the error of keys kept orthogonal to the prompt's queries; values and window as kivi."""

    lam: float = 1.0
    rank: int | None = dataclasses.field(default=None, metadata=optional(int))
    subblock: int = 8
    unit: Unit = Unit.DIAGONAL
    subspace: Subspace = Subspace.BATCH
    queries: Queries = Queries.PRE
    guard: bool = True
    rotate: Rotate = dataclasses.field(default=cast(Rotate, None), kw_only=True, metadata=optional(Rotate))
    """None, until the scheme is made: k, or none where keys are stored before RoPE."""

    calibrated: ClassVar[frozenset[str]] = frozenset({"moves"})
    uncalibrated: ClassVar[str] = "with lam=0, as kivi with the same rotation would"
    error_feedback_plane: ClassVar[str | None] = "moves"
    name: ClassVar[str] = "squat"
    kernel_encoding: ClassVar[bool] = True
    source: ClassVar[str] = "SQuat: Subspace-orthogonal KV Cache Quantization, sections 3 and B.2"

    def __post_init__(self) -> None:
        if self.rotate is None:
            object.__setattr__(self, "rotate", Rotate.NONE if self.pre_rope is True else Rotate.K)
        super().__post_init__()
        require(self.axis is not Axis.TOKEN, self.name, "axis", "auto or channel", self.axis, "its keys share scales along tokens")
        number = isinstance(self.lam, (int, float)) and not isinstance(self.lam, bool)
        require(
            number and math.isfinite(self.lam) and 0 <= self.lam <= LARGEST_LAM, self.name, "lam",
            f"a number from 0 to {LARGEST_LAM:g}", self.lam, "1 is usual with a unit, 1e-3 without; 0 is kivi",
        )
        require(
            self.rank is None or (_whole(self.rank) and self.rank >= 1), self.name, "rank", "a whole number of directions, or None for all",
            self.rank, "None is the default, 5 the paper's setting",
        )
        require(
            _whole(self.subblock) and (self.subblock in {1, 2, 4} or (self.subblock > 0 and self.subblock % 8 == 0)), self.name, "subblock",
            "1, 2, 4 or a multiple of 8 that divides the head dim", self.subblock, "8 is the default, 64 the paper's setting; "
            "half of the head dim is the most that is used",
        )
        require(isinstance(self.unit, Unit), self.name, "unit", "diagonal, queries or none", self.unit, "diagonal is the default")
        require(isinstance(self.subspace, Subspace), self.name, "subspace", "batch or row", self.subspace, "batch is the paper's rule")
        require(isinstance(self.queries, Queries), self.name, "queries", "pre, post or distances", self.queries, "pre is the default")
        require(isinstance(self.guard, bool), self.name, "guard", "True or False", self.guard, "True is the default")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the options from a pickle; a pickle of a version before 0.2 keeps its values under this version's names."""
        options = respelled(state)
        enums = {name: kind(options[name]) for name, kind in (("unit", Unit), ("rotate", Rotate), ("queries", Queries))}
        self.__dict__.update({**options, **enums})

    @classmethod
    def written_before(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        return respelled(super().written_before(options))

    @classmethod
    def paper(cls, **options: Any) -> Squat:
        """Return the paper's setting: lam 1e-3 without a unit, five directions, 64 channels at a time, no rotation and no guard."""
        return cls(**{**PAPER, "unit": Unit.NONE, "rotate": Rotate.NONE, "queries": Queries.PRE, "guard": False, **options})

    @classmethod
    def longbench(cls, model: str, pre_rope: bool = False, **options: Any) -> Squat:
        """Return the scheme with the paper's LongBench setting for ``model``: ``llama-2-7b``, ``llama-3.1-8b`` or ``mistral-7b``.

        ``pre_rope``: the setting of the paper's variant SQuat-pre. ``options``: options that replace the setting's. Raises BadOption for
        another model.
        """
        known = sorted({name for name, _ in LONGBENCH})
        require(model in known, cls.name, "longbench", f"one of {', '.join(known)}", model, "Squat.paper() has the paper's other setting")
        return cls.paper(**{**LONGBENCH[model, pre_rope], "pre_rope": pre_rope, **options})

    @classmethod
    def named(cls) -> dict[str, dict[str, object]]:
        if cls is not Squat:
            return {}
        made = {
            "squat-paper": cls.paper(), "squat-pre-paper": cls.paper(pre_rope=True),
            **{f"squat{'-pre' if before else ''}-longbench-{model}": cls.longbench(model, before) for model, before in LONGBENCH},
        }
        return {"squat-pre": {"pre_rope": True}, **{name: _changes(scheme) for name, scheme in made.items()}}

    @property
    def calibrates_before_rope(self) -> bool:  # type: ignore[override]
        """Whether ``calibrate`` takes queries before RoPE."""
        return self.pre_rope and self.queries is not Queries.POST

    @property
    def calibrates_on_keys(self) -> bool:  # type: ignore[override]
        """Whether ``calibrate`` takes the call's keys."""
        return self.guard

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            {"bits": 4, "subblock": 16, "unit": Unit.QUERIES, "rank": 20, "rotate": Rotate.NONE, "guard": False},
            {"bits": 3, "group": 16, "window": 64, "subspace": Subspace.ROW}, {"lam": 0.0}, {"rotate": Rotate.KV, "sinks": 40},
        ]
        return (default, *(dataclasses.replace(default, **change) for change in changes))

    @property
    def warning(self) -> str | None:  # type: ignore[override]
        """The report's warning about a setting that is known to do harm; None for others."""
        if self.unit is not Unit.NONE or self.lam <= STRONG_LAM:
            return None
        return (
            f"{self.name}: lam={self.lam:g} multiplies squared singular values, which grow with the prompt; above "
            f"{STRONG_LAM:g} it only did harm in SQuat's own ablation (Table 3): lower it, or pass unit=diagonal"
        )

    def for_role(self, role: Role) -> Kivi:
        if role is Role.KEY:
            return dataclasses.replace(self, axis=Axis.CHANNEL)
        return Kivi(self.bits, self.group, self.window, self.axis, self.scale_dtype, **self.beside).for_role(role)

    def minmax(self, head_dim: int) -> MinMax | None:
        made = super().minmax(head_dim)
        return dataclasses.replace(made, subblock=self.channels_at_once(head_dim)) if made is not None and self.lam > 0 else made

    def channels_at_once(self, head_dim: int) -> int:
        """Return how many channels of a head are quantized at a time: at most half, since each sub-block's error is fed into later ones."""
        return max(1, min(self.subblock, head_dim // 2))

    def check(self, slot: SlotSpec) -> None:
        super().check(slot)
        if slot.role is not Role.KEY:
            return
        require_divides(self.channels_at_once(slot.head_dim), slot, self.name, "subblock")
        if self.rank is not None and self.rank > slot.head_dim:
            raise BadOption(
                scheme=self.name, option="rank", expected=f"at most the head dim ({slot.head_dim})", found=self.rank,
                todo="queries have no more directions than channels",
            )

    def calibrates(self, slot: SlotSpec) -> bool:
        return slot.role is Role.KEY and self.lam > 0

    def layout(self, slot: SlotSpec) -> Layout:
        layout = super().layout(slot)
        if not self.calibrates(slot):
            return layout
        extent = Extent.ROW if self.subspace is Subspace.ROW else Extent.BATCH
        moves = PlaneSpec("moves", torch.float32, slot.head_dim, slot.head_dim, extent)
        return Layout((*layout.planes, moves)).with_sinks(slot, self.sinks)

    def calibrate(self, q_BKGSD: torch.Tensor, keep_BS: torch.Tensor | None, prompt: Prompt = UNTOLD) -> Planes:
        keys = prompt.keys
        if self.subspace is Subspace.BATCH:
            q_BKGSD, keep_BS, keys = q_BKGSD[:1], None if keep_BS is None else keep_BS[:1], None if keys is None else keys[:1]
        rows, _, groups, tokens = q_BKGSD.shape[:4]
        real = torch.ones(rows, tokens, dtype=torch.bool, device=q_BKGSD.device) if keep_BS is None else keep_BS

        def seen(these_RS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Return (the sum of q q^T over the queries in the mask ``these_RS``, [B, K, D, D]; their number, at least one per group)."""
            q = torch.where(these_RS[:, None, None, :, None], q_BKGSD, torch.zeros((), dtype=q_BKGSD.dtype, device=q_BKGSD.device))
            gram = algebra.gram(q.flatten(2, 3))
            if prompt.angles is not None and self.pre_rope and self.queries is Queries.DISTANCES:
                gram = algebra.over_distances(gram, prompt.angles, real, self.window)
            return gram, groups * these_RS.sum(-1).clamp(min=1).to(torch.float64)[:, None, None, None]

        moves = self._moves(*seen(real))
        if self.guard and keys is not None:
            learned, last = guarding.split(real)
            own = real if keys.shape[2] == tokens else torch.ones(rows, keys.shape[2], dtype=torch.bool, device=keys.device)
            tried = guarding.sampled(keys, own, self.group)
            better = guarding.wins(self._coded, tried, self._moves(*seen(learned)), seen(last)[0])
            moves = torch.where(better, moves, guarding.DECLINED)
        return (moves.to(torch.float32).unsqueeze(0),)

    def _coded(self, keys_BKSD: torch.Tensor, moves: torch.Tensor | None) -> torch.Tensor:
        """Return keys [B, K, S, D] after encoding with a plane of error feedback [B, K, D, D] (None: without) and decoding."""
        slot = SlotSpec(keys_BKSD.shape[1], keys_BKSD.shape[3], torch.float32, Role.KEY)
        own = dataclasses.replace(self, axis=Axis.CHANNEL)
        return own.decode(own.encode(keys_BKSD, *(() if moves is None else (moves.unsqueeze(0),))), slot)

    def _moves(self, gram_BKDD: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the plane of error feedback of each head, float64 [B, K, D, D], from the sum of q q^T over ``count`` queries.

        Zeros, which feed back nothing, for a head whose plane is not finite.
        """
        size = count if self.unit is Unit.QUERIES else torch.ones_like(count)
        if self.unit is Unit.DIAGONAL:
            mean = gram_BKDD.to(torch.float64).diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            size = torch.where(mean == 0, 1, mean)
        width = gram_BKDD.shape[-1]
        weight = self.lam / size * algebra.leading(gram_BKDD, width if self.rank is None else self.rank)
        moves = algebra.moves(weight, self.channels_at_once(width))
        finite = torch.isfinite(moves).all(-1, keepdim=True).all(-2, keepdim=True)
        return torch.where(finite, moves, torch.zeros_like(moves))

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        if not fixed:
            return super().encode(x_BKSD)
        moves = fixed[0][0]
        rest = x_BKSD.to(torch.float32)
        made: list[Planes] = []
        width = self.channels_at_once(rest.shape[-1])
        for start in range(0, rest.shape[-1], width):
            k, rest = rest[..., :width], rest[..., width:]
            codes, scale, zero = self.quantize(k)
            made.append((codes, scale, zero))
            if not rest.shape[-1]:
                break
            error = self._spread(scale) * codes.to(torch.float32) + self._spread(zero) - k
            error = torch.where(torch.isfinite(error), error, torch.zeros_like(error))
            end = start + width
            rest = rest + _by_head(error, moves[:, :, start:end, end:])
        codes, scale, zero = (torch.cat(parts, dim=-1) for parts in zip(*made, strict=True))
        return pack(codes, self.bits), scale, zero

    def _spread(self, plane: torch.Tensor) -> torch.Tensor:
        """Return scales or zero points [B, K, S / group, D] as float32 [B, K, S, D]."""
        return plane.to(torch.float32).repeat_interleave(self.group, dim=-2)

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        """Return None if queries move the keys: the error then depends on them, not only on the group's values.

        The stored planes give another bound: with e the errors of the codes, each within ``radius``, k' - k = e (I + moves). Certificates
        use that (``error_feedback_plane``).
        """
        return None if self.calibrates(slot) else super().bound(slot)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _by_head(error_BKSg: torch.Tensor, moves_BKgR: torch.Tensor) -> torch.Tensor:
    """Return error @ moves, [B, K, S, R]; moves shared by all rows are not copied."""
    if moves_BKgR.shape[0] == error_BKSg.shape[0]:
        return error_BKSg @ moves_BKgR
    return torch.einsum("bksg,kgr->bksr", error_BKSg, moves_BKgR[0])
