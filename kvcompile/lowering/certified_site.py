"""``kvcompile::certified_site``: certified attention as it stands in a compiled graph, with its telemetry.

The operands of ``attend``, all planes that grow (codes, scales, zeros, notes, originals), the newest tokens, and the telemetry plane,
which every step adds to; where the originals are in host memory, the scratch and where blocks are in it. The policy is the keys' scheme's.

On CUDA it is made of kernels (``certified_device``), which compiled graphs hold one by one; elsewhere, and for what the kernels do not
know, it is the definition. What CUDA leaves to the definition is logged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.lowering.certified import certified_step
from kvcompile.lowering.certified_device import certified_by_kernels, kernel_gap
from kvcompile.lowering.certified_telemetry import accumulate
from kvcompile.lowering.ops import LIBRARY
from kvcompile.schemes.certified import Certified, Half
from kvcompile.schemes.certify import parse_policy

log = logging.getLogger(__name__)

LIBRARY.define(
    "certified_site(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim, Tensor[] recent, Tensor base,"
    " Tensor(a!) telemetry, Tensor(b!)? places=None, Tensor(c!)? scratch=None) -> Tensor"
)


def certified_site_body(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None,
    keep: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None, key_scheme: str, value_scheme: str, scale: float,
    softcap: float, value_dim: int, recent: Sequence[torch.Tensor], base: torch.Tensor, telemetry: torch.Tensor,
    places: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """``certified_attend`` at the step that the telemetry counts, which it adds to. The definition leaves the scratch alone."""
    scheme = schemes.parse(key_scheme)
    assert isinstance(scheme, Certified)
    rules, originals = parse_policy(scheme.certify), [keys[4], values[4]]
    both = dataclasses.replace(scheme, half=Half.AUTO)
    if q.device.type == "cuda" and kernel_gap(q, keys, values, keep, bias, scheme.group, softcap, value_dim, recent) is None:
        # The first accumulator of the first kv head counts steps.
        return certified_by_kernels(
            rules, both, q, keys[:4], values[:4], originals, hi, lo, sinks, telemetry, scale, value_dim, recent, base, telemetry=telemetry,
            scratch=None if places is None or scratch is None else (places, scratch),
        )[0]
    clock = telemetry[0, :1, 0, 0, 0].to(torch.int64)
    output, figures, counts = certified_step(
        rules, both, q, keys[:4], values[:4], originals, hi, lo, keep, bias, sinks, clock, scale, softcap, value_dim, recent, base
    )
    accumulate(telemetry, figures, counts)
    return output


def certified_site_traced(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None,
    keep: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None, key_scheme: str, value_scheme: str, scale: float,
    softcap: float, value_dim: int, *more: Any,
) -> torch.Tensor:
    """What a compiled graph traces: the kernels where they know the attention, else the operation as it is."""
    operands = (q, keys, values, hi, lo, keep, bias, sinks, key_scheme, value_scheme, scale, softcap, value_dim, *more)
    if q.device.type == "cuda":
        scheme = schemes.parse(key_scheme)
        assert isinstance(scheme, Certified)
        gap = kernel_gap(q, keys, values, keep, bias, scheme.group, softcap, value_dim, more[0])
        if gap is None:
            return certified_site_body(*operands)
        log.warning("certified attention runs its definition, which reads everything at every step: found %s", gap)
    return certified_site(*operands)


def certified_site_meta(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None,
    keep: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None, key_scheme: str, value_scheme: str, scale: float,
    softcap: float, value_dim: int, recent: Sequence[torch.Tensor], base: torch.Tensor, telemetry: torch.Tensor,
    places: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape of the result."""
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], value_dim)


LIBRARY.impl("certified_site", certified_site_body, "CompositeExplicitAutograd")
LIBRARY.impl("certified_site", certified_site_meta, "Meta")

certified_site = torch.ops.kvcompile.certified_site.default
