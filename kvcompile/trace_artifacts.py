"""Artifacts for torch's structured trace (``TORCH_TRACE=folder``, read by tlparse): each graph before and after, and its report as JSON.

Without a trace nothing is printed or kept: torch asks for the text only where a trace is written.
"""

from __future__ import annotations

import json

from torch import fx

from kvcompile.passes.graph.dynamo import trace_structured
from kvcompile.report import GraphReport, Report, short_paths


def trace_graph(index: int, name: str, module: fx.GraphModule) -> None:
    """Write a graph's text into the trace, as the artifact ``kvcompile_graph_INDEX_NAME``."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"kvcompile_graph_{index}_{name}", "encoding": "string"},
        payload_fn=lambda: short_paths(module.print_readable(print_output=False)),
        # A variant that a call needs first is compiled outside of Dynamo.
        expect_trace_id=False,
    )


def trace_report(graph: GraphReport) -> None:
    """Write the report of one graph into the trace, as the artifact ``kvcompile_graph_INDEX_report``: the JSON of ``explain --json``."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"kvcompile_graph_{graph.index}_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(Report(graphs=[graph]).plain(), indent=2), expect_trace_id=False,
    )
