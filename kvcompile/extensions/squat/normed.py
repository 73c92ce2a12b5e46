"""normed: two-bit keys that are rotated and divided by their norms before channels are quantized; values as ``kivi``.

    k = n u;   u is quantized per channel over groups of tokens;   n, one number per token, multiplies the score

Tokens whose keys are much shorter or longer than others (first tokens are) widen the steps of every channel of their group. "OScaR: The
Occam's Razor for Extreme KV Cache Quantization in LLMs and Beyond" (Su et al. 2026, arXiv 2605.19660) rotates queries and keys by a
Hadamard matrix, so that no channel dominates, and divides by each key's norm. This module follows its abstract and reviews of it, with
these choices:

* n is half the root mean square of the channels, not the length (``schemes.norms``), and u is computed with the stored n.
* NaN or Inf in a token makes its norm NaN, and with it the whole block of tokens.

``turn`` selects the rotation. ``queries``: the eigenvectors of q q^T over the prompt's queries of a kv head, the basis in which channels
contribute to scores independently; ``both``: those, then the Hadamard matrix, so that all channels contribute equally ("OSCAR: Offline
Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", Zhou et al. 2026, arXiv 2605.17757, which has R = U H P, P a
permutation that matters to groups of channels only, rotates values too, and computes R beforehand). Here U comes from the queries of the
call that fills an empty cache, like the planes of ``squat``. The matrix is a rotation for any queries: without quantization attention of
every row is exact.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.extensions.squat import subspace as algebra
from kvcompile.extensions.squat.scheme import Subspace
from kvcompile.schemes.asymmetric import Axis, Kivi
from kvcompile.schemes.base import AMAX, NORM, QUIET, UNTOLD, Planes, Prompt, Scheme, require
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.bounds import STEP, ZERO
from kvcompile.schemes.norms import half_root_mean_square
from kvcompile.schemes.rotation import Rotate, Rotation, rotation_matrix
from kvcompile.types import PAGE, Extent, KernelFormat, Layout, MinMax, PlaneSpec, Role, SlotSpec


class Turn(enum.Enum):
    """The rotation of keys: a Hadamard matrix, the eigenvectors of the prompt's queries, or the eigenvectors followed by the matrix."""

    HADAMARD = "hadamard"
    QUERIES = "queries"
    BOTH = "both"


@dataclasses.dataclass(frozen=True)
class Normed(Kivi):
    """The scheme normed: asymmetric codes of rotated keys divided by their norms; values and window as kivi."""

    turn: Turn = Turn.HADAMARD
    subspace: Subspace = Subspace.BATCH
    rotate: Rotate = dataclasses.field(default=Rotate.K, kw_only=True, metadata=QUIET)

    calibrated: ClassVar[frozenset[str]] = frozenset({"rotation"})
    uncalibrated: ClassVar[str] = "rotated by a Hadamard matrix alone"
    name: ClassVar[str] = "normed"
    kernel_encoding: ClassVar[bool] = True
    source: ClassVar[str] = "OScaR: The Occam's Razor for Extreme KV Cache Quantization; turn=queries and both after OSCAR"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.axis is not Axis.TOKEN, self.name, "axis", "auto or channel", self.axis, "its keys share scales along tokens")
        require(isinstance(self.turn, Turn), self.name, "turn", "hadamard, queries or both", self.turn, "hadamard is the default")
        require(isinstance(self.subspace, Subspace), self.name, "subspace", "batch or row", self.subspace, "batch is the default")
        require(
            self.turn is Turn.HADAMARD or self.rotate is not Rotate.NONE, self.name, "turn", "hadamard where nothing is rotated", self.turn,
            "leave turn or rotate=none out",
        )

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        default = cls()
        changes: list[dict[str, Any]] = [
            {"bits": 4, "turn": Turn.QUERIES, "sinks": 5},
            {"bits": 3, "group": 16, "window": 64, "turn": Turn.BOTH, "subspace": Subspace.ROW},
            {"scale_dtype": torch.bfloat16, "rotate": Rotate.NONE},
        ]
        return (default, *(dataclasses.replace(default, **change) for change in changes))

    def for_role(self, role: Role) -> Kivi:
        if role is Role.KEY:
            return dataclasses.replace(self, axis=Axis.CHANNEL)
        return Kivi(self.bits, self.group, self.window, self.axis, self.scale_dtype, **self.beside).for_role(role)

    def minmax(self, head_dim: int) -> MinMax | None:
        made = super().minmax(head_dim)
        return None if made is None else dataclasses.replace(made, norms=True)

    def calibrates(self, slot: SlotSpec) -> bool:
        return slot.role is Role.KEY and self.turn is not Turn.HADAMARD

    def rotation(self, slot: SlotSpec) -> Rotation | None:
        rotation = super().rotation(slot)
        return dataclasses.replace(rotation, plane="rotation") if rotation is not None and self.calibrates(slot) else rotation

    def layout(self, slot: SlotSpec) -> Layout:
        layout = super().layout(slot)
        if slot.role is not Role.KEY:
            return layout
        grown, fixed = layout.planes[: layout.encoded], layout.planes[layout.encoded :]
        extent = Extent.ROW if self.subspace is Subspace.ROW else Extent.BATCH
        own = (PlaneSpec("rotation", torch.float32, slot.head_dim, slot.head_dim, extent),) if self.calibrates(slot) else ()
        return Layout((*grown, PlaneSpec("norms", self.scale_dtype, 1, PAGE), *fixed, *own)).with_sinks(slot, self.sinks)

    def format(self, slot: SlotSpec) -> KernelFormat:
        return dataclasses.replace(super().format(slot), norms=slot.role is Role.KEY)

    def calibrate(self, q_BKGSD: torch.Tensor, keep_BS: torch.Tensor | None, prompt: Prompt = UNTOLD) -> Planes:
        """Return the queries' rotation minus the Hadamard matrix, float32 [1, 1 or B, K, D, D]; zeros for a head where it is not finite.

        Zeros leave the Hadamard matrix alone. ``keep_BS``: False for padding. ``prompt`` is not read.
        """
        del prompt
        if self.subspace is Subspace.BATCH:
            q_BKGSD, keep_BS = q_BKGSD[:1], None if keep_BS is None else keep_BS[:1]
        if keep_BS is not None:
            q_BKGSD = torch.where(keep_BS[:, None, None, :, None], q_BKGSD, torch.zeros((), dtype=q_BKGSD.dtype, device=q_BKGSD.device))
        found = algebra.eigenvectors(algebra.gram(q_BKGSD.flatten(2, 3)))
        slot = SlotSpec(q_BKGSD.shape[1], q_BKGSD.shape[-1], q_BKGSD.dtype, Role.KEY)
        rotation = self.rotation(slot)
        assert rotation is not None
        hadamard = rotation_matrix(slot.head_dim, rotation.order, torch.zeros_like(found))
        added = (found @ hadamard if self.turn is Turn.BOTH else found) - hadamard
        finite = torch.isfinite(added).all(-1, keepdim=True).all(-2, keepdim=True)
        return (torch.where(finite, added, torch.zeros_like(added)).to(torch.float32).unsqueeze(0),)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        norm = half_root_mean_square(x_BKSD, self.scale_dtype)
        size = norm.to(torch.float32)
        return (*super().encode(x_BKSD.to(torch.float32) / torch.where(size == 0, 1.0, size)), norm)

    def radius(self, slot: SlotSpec) -> sympy.Expr | None:
        if slot.role is not Role.KEY:
            return super().radius(slot)
        # As kivi's, times the norm, which STEP and ZERO include already; dividing and multiplying by it rounds twice more.
        return STEP / 2 + (ZERO + 2 * (2**self.bits - 1) * STEP) * sympy.Float(2.0**-20) + bounds.TINY

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        own = super().bound(slot)
        return own if own is None or slot.role is not Role.KEY else NORM * (own + AMAX * sympy.Float(2.0**-22)) + bounds.TINY
