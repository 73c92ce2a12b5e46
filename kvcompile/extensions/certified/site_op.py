"""``kvcompile::certified_site``: certified attention with its telemetry, as one operation of a compiled graph.

Its operands are those of ``attend``; all planes that grow (codes, scales, zeros, notes, originals; only originals and notes for values that
are stored without codes); the newest tokens; and the telemetry plane, which every step adds to. If originals are in host memory, keys and
values each also have the scratch and the plane of blocks' slots in it. The policy is that of the keys' scheme.

On CUDA it runs kernels (``device_step``); elsewhere, and for calls that the kernels do not support, the definition. In a compiled graph it
stays one operation until Inductor lowers it (``lower``).
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
    """Operands of ``certified_site``: those of ``attend``, the telemetry, and the scratches if originals are in host memory."""

    attend: AttendOperands[T]
    telemetry: T
    key_scratch: tuple[T, T] | None = None
    value_scratch: tuple[T, T] | None = None

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> SiteOperands:
        """Return the operands of a call of ``certified_site`` by name, from the call's ``args`` and ``kwargs``."""
        given = named(certified_site, args, kwargs)
        held = ((given.get(f"{prefix}places"), given.get(f"{prefix}scratch")) for prefix in ("", "value_"))
        return SiteOperands(attend_operands(given), given["telemetry"], *(None if pair[1] is None else pair for pair in held))

    @property
    def scheme(self) -> Certified:
        """The scheme of the site; the keys' scheme holds the policy of both keys and values."""
        scheme = schemes.parse(self.attend.key_scheme)
        assert isinstance(scheme, Certified)
        return dataclasses.replace(scheme, key_or_value=KeyOrValue.AUTO)

    @property
    def codes(self) -> AttendOperands[T]:
        """Return the operands of ``attend`` with the encoded planes only: codes, scales, zero points, notes.

        For values that are stored without codes, these are originals and notes.
        """
        values = self.attend.values
        return dataclasses.replace(self.attend, keys=self.attend.keys[:4], values=values[:4] if len(values) > 2 else values)

    @property
    def originals(self) -> list[T]:
        """The planes of tier 2, of keys and of values."""
        values = self.attend.values
        return [self.attend.keys[4], values[4] if len(values) > 2 else values[0]]


def site_gap(operands: SiteOperands[torch.Tensor]) -> str | None:
    """Return the reason why the kernels do not support a site, None if the kernels support it; takes real tensors and fake ones."""
    return kernel_gap(operands.codes, operands.scheme)


def site_by_kernels(launcher: Launcher, operands: SiteOperands[torch.Tensor]) -> torch.Tensor:
    """Return attention's result [B, H, S, Dv] for a site for which ``site_gap`` is None, and add the step to its telemetry.

    ``launcher`` starts the kernels.
    """
    both, telemetry = operands.scheme, operands.telemetry
    # The first accumulator of the first kv head counts steps.
    return certified_by_kernels(
        parse_policy(both.certify), both, operands.codes, operands.originals, telemetry, telemetry=telemetry,
        scratch=Scratches(operands.key_scratch, operands.value_scratch), launcher=launcher,
    )[0]


def certified_site_body(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return attention's result [B, H, S, Dv] for the step whose number the telemetry holds; add the step to the telemetry, in place.

    Tensors on CUDA are handled by kernels where ``site_gap`` is None. The definition does not use the scratch.
    """
    operands: SiteOperands[torch.Tensor] = SiteOperands.of(args, kwargs)
    if operands.attend.q.device.type == "cuda" and site_gap(operands) is None:
        return site_by_kernels(Direct(cuda=True), operands)
    both, telemetry = operands.scheme, operands.telemetry
    clock = telemetry[0, :1, 0, 0, 0].to(torch.int64)
    output, figures, counts = certified_step(parse_policy(both.certify), both, operands.codes, operands.originals, clock)
    accumulate(telemetry, figures, counts)
    return output


def _certified_site_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return an empty tensor [B, H, S, Dv] of the queries' dtype and device, for fake tensors."""
    operands = SiteOperands.of(args, kwargs).attend
    return operands.q.new_empty(*operands.q.shape[:3], operands.value_dim)


LIBRARY.impl("certified_site", certified_site_body, "CompositeExplicitAutograd")
LIBRARY.impl("certified_site", _certified_site_meta, "Meta")

certified_site = torch.ops.kvcompile.certified_site.default
