"""``kvcompile::report_site``: the certificate of an ``attend`` over codes, as an operation that follows it in a compiled graph.

Takes ``attend``'s result and operands, and adds the step's certificate (``report``) to a telemetry plane: the three bounds, and as causes
the number of certificates above their budget or not finite. Nothing falls back, so every step counts as rung PLAIN with equal candidate and
returned figures, and reads no block in full precision: those counters stay zero. Only the policy's budgets are used.

It reads all keys and values again at every step. On CUDA it is ordinary tensor code of the graph; elsewhere it is one operation. The tensor
code takes values that it shares with ``attend`` through ``kvcompile::as_stored``: fused with its producer, a value would not be rounded to
its dtype as ``attend`` reads it, and the producer might be compiled otherwise than without a report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.lowering.certificate.head_bounds import causes_of
from kvcompile.lowering.certificate.report import report_step
from kvcompile.lowering.certificate.telemetry import Counted, accumulate, counts_of, figures_of
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named
from kvcompile.lowering.ops.operations import LIBRARY
from kvcompile.schemes.certificate.policy import parse_policy

LIBRARY.define(
    "report_site(Tensor output, Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim, Tensor[]? exact_newest, Tensor? base,"
    " Tensor(a!) telemetry, str certify, Tensor? refilled, Tensor? error_feedback, Tensor[]? exact_first=None,"
    " Tensor? exact_first_at=None) -> ()"
)
LIBRARY.define("as_stored(Tensor x) -> Tensor")


@dataclass(frozen=True)
class ReportOperands:
    """Operands of ``report_site``: ``attend``'s result and operands, the telemetry plane, and the policy as text.

    ``refilled`` [1, B, K, 1, 1]: the position from which on tokens in the window were never encoded; the window's earlier tokens were
    decoded from codes. ``error_feedback`` [1, 1 or B, K, D, D]: the keys' plane that ``Scheme.error_feedback_plane`` names. Both may be
    None.
    """

    output: torch.Tensor
    attend: AttendOperands[torch.Tensor]
    telemetry: torch.Tensor
    certify: str
    refilled: torch.Tensor | None
    error_feedback: torch.Tensor | None

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ReportOperands:
        """Return the operands of a call of ``report_site`` by name, from the call's ``args`` and ``kwargs``."""
        given = named(report_site, args, kwargs)
        return ReportOperands(
            given["output"], attend_operands(given), given["telemetry"], given["certify"], given["refilled"], given["error_feedback"],
        )


def add_report(operands: ReportOperands) -> None:
    """Add the certificate of ``output`` to the telemetry plane [1, B, K, 1, TELEMETRY], in place."""
    refilled, error_feedback = operands.refilled, operands.error_feedback
    bounds, delta = report_step(
        operands.output, operands.attend, None if refilled is None else refilled[0, :, 0, 0, 0],
        None if error_feedback is None else error_feedback[0],
    )
    zero, no = torch.zeros_like(delta), torch.zeros_like(delta, dtype=torch.bool)
    causes = causes_of(bounds, parse_policy(operands.certify))
    figures, counted = figures_of(bounds, no, zero, delta, zero), Counted(zero, zero, zero, zero)
    accumulate(operands.telemetry, figures, counts_of(counted, no, no, causes))


def report_site_code(*args: Any, **kwargs: Any) -> None:
    """Run ``report_site`` as tensor code of the graph that contains the ``attend``."""
    operands = ReportOperands.of(args, kwargs)
    attend = operands.attend
    exact_newest = attend.exact_newest and [as_stored(x) for x in attend.exact_newest]
    bias, sinks = (None if x is None else as_stored(x) for x in (attend.bias, attend.sinks))
    output, q = as_stored(operands.output), as_stored(attend.q)
    attend = dataclasses.replace(attend, q=q, bias=bias, sinks=sinks, exact_newest=exact_newest)
    add_report(dataclasses.replace(operands, output=output, attend=attend))


def report_site_traced(output: torch.Tensor, *operands: Any) -> None:
    """Add a step's report in a compiled graph: by tensor code on CUDA, otherwise by the operation."""
    (report_site_code if output.device.type == "cuda" else report_site)(output, *operands)


def _report_site(*args: Any, **kwargs: Any) -> None:
    add_report(ReportOperands.of(args, kwargs))


def _as_stored(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _as_stored_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _report_site_meta(*operands: Any) -> None:
    return None


LIBRARY.impl("report_site", _report_site, "CompositeExplicitAutograd")
LIBRARY.impl("report_site", _report_site_meta, "Meta")
LIBRARY.impl("as_stored", _as_stored, "CompositeExplicitAutograd")
LIBRARY.impl("as_stored", _as_stored_meta, "Meta")

report_site = torch.ops.kvcompile.report_site.default
as_stored = torch.ops.kvcompile.as_stored.default
