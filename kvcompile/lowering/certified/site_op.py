"""``kvcompile::certified_site``: certified attention as it stands in a compiled graph, with its telemetry.

The operands of ``attend``, all planes that grow (codes, scales, zeros, notes, originals), the newest tokens, and the telemetry plane,
which every step adds to; where the originals are in host memory, the scratch and where blocks are in it. The policy is the keys' scheme's.

On CUDA it is made of kernels (``device_step``), elsewhere, and for what the kernels do not know, it is the definition. In a compiled
graph it stays one operation until Inductor lowers it (``lower``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvcompile import schemes
from kvcompile.lowering.certificate.telemetry import accumulate
from kvcompile.lowering.certified.definition import certified_step
from kvcompile.lowering.certified.device_step import certified_by_kernels, kernel_gap
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.schemes.certificate.policy import parse_policy
from kvcompile.schemes.certified import Certified, Half

LIBRARY.define(
    "certified_site(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim, Tensor[] recent, Tensor base,"
    " Tensor(a!) telemetry, Tensor(b!)? places=None, Tensor(c!)? scratch=None) -> Tensor"
)


def _scheme(key_scheme: str) -> Certified:
    """The scheme of a site, whose keys say the policy of both halves."""
    scheme = schemes.parse(key_scheme)
    assert isinstance(scheme, Certified)
    return dataclasses.replace(scheme, half=Half.AUTO)


def site_gap(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], keep: torch.Tensor | None, bias: torch.Tensor | None,
    key_scheme: str, softcap: float, value_dim: int, recent: Sequence[torch.Tensor],
) -> str | None:
    """Why the kernels do not know a site, None where they do; for real tensors and fake ones."""
    return kernel_gap(q, keys, values, keep, bias, _scheme(key_scheme).group, softcap, value_dim, recent)


def site_by_kernels(
    launcher: Launcher, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], hi: torch.Tensor,
    lo: torch.Tensor | None, sinks: torch.Tensor | None, key_scheme: str, scale: float, value_dim: int, recent: Sequence[torch.Tensor],
    base: torch.Tensor, telemetry: torch.Tensor, places: torch.Tensor | None, scratch: torch.Tensor | None,
) -> torch.Tensor:
    """The result of a site without a gap; its kernels are started by ``launcher``."""
    both = _scheme(key_scheme)
    # The first accumulator of the first kv head counts steps.
    return certified_by_kernels(
        parse_policy(both.certify), both, q, keys[:4], values[:4], [keys[4], values[4]], hi, lo, sinks, telemetry, scale, value_dim,
        recent, base, telemetry=telemetry, scratch=None if places is None or scratch is None else (places, scratch), launcher=launcher,
    )[0]


def certified_site_body(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None,
    keep: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None, key_scheme: str, value_scheme: str, scale: float,
    softcap: float, value_dim: int, recent: Sequence[torch.Tensor], base: torch.Tensor, telemetry: torch.Tensor,
    places: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """``certified_attend`` at the step that the telemetry counts, which it adds to. The definition leaves the scratch alone."""
    if q.device.type == "cuda" and site_gap(q, keys, values, keep, bias, key_scheme, softcap, value_dim, recent) is None:
        return site_by_kernels(
            Direct(cuda=True), q, keys, values, hi, lo, sinks, key_scheme, scale, value_dim, recent, base, telemetry, places, scratch
        )
    both = _scheme(key_scheme)
    rules, originals = parse_policy(both.certify), [keys[4], values[4]]
    clock = telemetry[0, :1, 0, 0, 0].to(torch.int64)
    output, figures, counts = certified_step(
        rules, both, q, keys[:4], values[:4], originals, hi, lo, keep, bias, sinks, clock, scale, softcap, value_dim, recent, base
    )
    accumulate(telemetry, figures, counts)
    return output


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
