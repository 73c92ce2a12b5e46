"""A report as plain data for JSON: all of its fields, enums by their values, paths and lines as text."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from kvcompile.report.data import ReportFields


def plain(report: ReportFields) -> dict[str, Any]:
    """Return every field of a report, and the counts of sites and refusals, as data that json writes."""
    return {"sites": report.sites, "refused": len(report.refusals), **_plain(report)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.metadata.get("plain", True)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
