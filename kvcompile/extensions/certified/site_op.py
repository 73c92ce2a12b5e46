"""``kvcompile::certified_site``: certified attention as it stands in a compiled graph, with its telemetry.

The operands of ``attend``, all planes that grow (codes, scales, zeros, notes, originals; of values that are no codes originals and notes),
the newest tokens, and the telemetry plane, which every step adds to; where originals are in host memory, of keys and of values the scratch
and where blocks are in it. The policy is the keys' scheme's.

On CUDA it is made of kernels (``device_step``), elsewhere, and for what the kernels do not know, it is the definition. In a compiled
graph it stays one operation until Inductor lowers it (``lower``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from kvcompile import schemes
from kvcompile.extensions.certified.definition import certified_step
from kvcompile.extensions.certified.device_step import Scratches, certified_by_kernels
from kvcompile.extensions.certified.scheme import Certified
from kvcompile.extensions.certified.sizes import kernel_gap
from kvcompile.lowering.certificate.telemetry import accumulate
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.operands import AttendOperands, T, attend_operands, named
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.schemes.certificate.policy import parse_policy
from kvcompile.types import KeyOrValue

LIBRARY.define(
    "certified_site(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim, Tensor[] exact_newest, Tensor base,"
    " Tensor(a!) telemetry, Tensor(b!)? places=None, Tensor(c!)? scratch=None, Tensor(d!)? value_places=None,"
    " Tensor(e!)? value_scratch=None) -> Tensor"
)


@dataclass(frozen=True)
class SiteOperands(Generic[T]):
    """Operands of ``certified_site``: those of ``attend``, the telemetry, and the scratch where the originals are in host memory."""

    attend: AttendOperands[T]
    telemetry: T
    key_scratch: tuple[T, T] | None = None
    value_scratch: tuple[T, T] | None = None

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> SiteOperands:
        """The record of a call of the operation."""
        given = named(certified_site, args, kwargs)
        held = ((given.get(f"{prefix}places"), given.get(f"{prefix}scratch")) for prefix in ("", "value_"))
        return SiteOperands(attend_operands(given), given["telemetry"], *(None if pair[1] is None else pair for pair in held))

    @property
    def scheme(self) -> Certified:
        """The scheme of the site, whose keys say the policy of both halves."""
        scheme = schemes.parse(self.attend.key_scheme)
        assert isinstance(scheme, Certified)
        return dataclasses.replace(scheme, half=KeyOrValue.AUTO)

    @property
    def codes(self) -> AttendOperands[T]:
        """Return the operands with the planes of codes alone: codes, scales, zero points, notes; of whole values originals and notes."""
        values = self.attend.values
        return dataclasses.replace(self.attend, keys=self.attend.keys[:4], values=values[:4] if len(values) > 2 else values)

    @property
    def originals(self) -> list[T]:
        """Return the planes of tier 2, keys and values."""
        values = self.attend.values
        return [self.attend.keys[4], values[4] if len(values) > 2 else values[0]]


def site_gap(operands: SiteOperands[torch.Tensor]) -> str | None:
    """Why the kernels do not know a site, None where they do; for real tensors and fake ones."""
    return kernel_gap(operands.codes, operands.scheme)


def site_by_kernels(launcher: Launcher, operands: SiteOperands[torch.Tensor]) -> torch.Tensor:
    """The result of a site without a gap; its kernels are started by ``launcher``."""
    both, telemetry = operands.scheme, operands.telemetry
    # The first accumulator of the first kv head counts steps.
    return certified_by_kernels(
        parse_policy(both.certify), both, operands.codes, operands.originals, telemetry, telemetry=telemetry,
        scratch=Scratches(operands.key_scratch, operands.value_scratch), launcher=launcher,
    )[0]


def certified_site_body(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attend at the step that the telemetry counts, which is added to. The definition leaves the scratch alone."""
    operands: SiteOperands[torch.Tensor] = SiteOperands.of(args, kwargs)
    if operands.attend.q.device.type == "cuda" and site_gap(operands) is None:
        return site_by_kernels(Direct(cuda=True), operands)
    both, telemetry = operands.scheme, operands.telemetry
    clock = telemetry[0, :1, 0, 0, 0].to(torch.int64)
    output, figures, counts = certified_step(parse_policy(both.certify), both, operands.codes, operands.originals, clock)
    accumulate(telemetry, figures, counts)
    return output


def _certified_site_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Shape of the result."""
    operands = SiteOperands.of(args, kwargs).attend
    return operands.q.new_empty(*operands.q.shape[:3], operands.value_dim)


LIBRARY.impl("certified_site", certified_site_body, "CompositeExplicitAutograd")
LIBRARY.impl("certified_site", _certified_site_meta, "Meta")

certified_site = torch.ops.kvcompile.certified_site.default
