"""The report of a backend: sites rewritten, sites refused with the reason, bytes before and after. Reads values of the pipeline only.

``data`` defines what a report says; ``text_view``, ``json_view`` and ``page`` show it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType

from kvcompile.report import json_view, page, text_view
from kvcompile.report.data import ReportFields, ReportSource
from kvcompile.report.detail import GraphDetail
from kvcompile.report.graphs import GraphReport, Pass, SiteReport, graph_report
from kvcompile.report.wording import count_text, short_pair, short_paths, short_scheme, short_text, size_text

__all__ = [
    "GraphDetail", "GraphReport", "Pass", "Report", "ReportSource", "SiteReport", "count_text", "graph_report", "short_pair", "short_paths",
    "short_scheme", "short_text", "size_text",
]


@dataclass
class Report(ReportFields):
    """All graphs that one backend compiled, and its live stores; ``print`` shows it, ``html`` returns it as a page."""

    def __rich__(self) -> RenderableType:
        return text_view.shown(self)

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def plain(self) -> dict[str, Any]:
        """Return every field, and the counts of sites and refusals, as data that json writes."""
        return json_view.plain(self)

    def html(self) -> str:
        """Return one self-contained page: no script, and nothing that is loaded from elsewhere.

        Graphs and kernels are written when this is called, while the backend is alive; a report keeps none. Waits for the device where
        there is telemetry.
        """
        return page.page(self)
