"""The fields of a report, defined once for its views as text, JSON and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcompile.passes.match.sites import Refusal
from kvcompile.report.detail import GraphDetail
from kvcompile.report.graphs import GraphReport
from kvcompile.schemes import Churn
from kvcompile.types import Role


class ReportSource(Protocol):
    """The interface through which a report's page gets graphs and kernels as text: from the backend, or from the records of its graphs."""

    def detail(self, index: int) -> GraphDetail | None:
        """Return graph ``index`` as text, before and after, with its kernels; None if its record is gone."""

    def telemetry_text(self) -> str:
        """Return the telemetry of certified attention as text; "" without any. Waits for the device."""


def no_source() -> None:
    """Return None: a report that no backend made has no graphs to show."""


@dataclass
class ReportFields:
    """The graphs that one backend compiled, and the bytes of its live stores.

    ``announced``: bytes as the scheme announces them for the stored tokens; ``allocated``: bytes that stores hold now; ``hosted``: the part
    of ``allocated`` in pinned host memory; ``dense``: bytes of a dense cache of the same tokens; ``callers``: bytes of the tensors that
    callers made for the caches, for a static cache its whole capacity; ``peak``: the most bytes that stores held at one time, freed caches
    included. ``shared``: bytes by which ``allocated`` would be larger if forks (``kvcompile.fork``) shared no memory.

    ``never_calibrated``: how keys are encoded, once for each live store whose scheme calibrates on queries and that never saw any.

    ``tokens``: the cache length that ``SiteReport`` bytes are for; None for the captured length.

    ``widths``: stored tokens by bits per channel, for keys and for values, over rows and layers, of adaptive schemes.

    ``churn``: counts of width changes. ``originals``: the part of ``allocated`` that holds full-precision copies outside the budget.

    ``unmatched``: policy entries that match no attention seen so far.

    ``disorder``: one message per row of a live cache whose tokens came out of order; attention returns NaN for such a row.

    ``stayed_dense``: caches that calls of rewritten graphs left dense or made dense, each with the reason.

    ``source``: returns the ReportSource for graphs and kernels as text, or None once the backend was freed. Not saved.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    announced: int = 0
    allocated: int = 0
    dense: int = 0
    hosted: int = 0
    never_calibrated: list[str] = field(default_factory=list)
    tokens: int | None = None
    widths: dict[Role, dict[int, int]] = field(default_factory=dict)
    churn: Churn = field(default_factory=Churn)
    originals: int = 0
    callers: int = 0
    peak: int = 0
    shared: int = 0
    unmatched: tuple[str, ...] = ()
    disorder: list[str] = field(default_factory=list)
    stayed_dense: tuple[str, ...] = ()
    source: Callable[[], ReportSource | None] = field(default=no_source, repr=False, compare=False, metadata={"plain": False})

    def count_widths(self, role: Role, histogram: Mapping[int, int], churn: Churn) -> None:
        """Add the tokens of one live store by bits per channel (``histogram``), and its counts of width changes."""
        held = self.widths.setdefault(role, {})
        for bits, count in histogram.items():
            held[bits] = held.get(bits, 0) + count
        self.churn = self.churn + churn

    @property
    def sites(self) -> int:
        """Number of rewritten sites over all graphs."""
        return sum(len(graph.sites) for graph in self.graphs)

    @property
    def refusals(self) -> list[Refusal]:
        """Refusals of all graphs."""
        return [refusal for graph in self.graphs for refusal in graph.refusals]

    @property
    def recompiles(self) -> int:
        """Number of graphs whose attentions are all attentions of an earlier graph with as many new tokens a call."""
        seen, count = set(), 0
        for graph in self.graphs:
            key = (frozenset(graph.paths), graph.sites[0].tokens if graph.sites else 0)
            count += bool(graph.paths) and key in seen
            seen.add(key)
        return count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": no_source}
