"""Warm: imports the libraries that a survey needs. The server from which the survey's processes are forked imports this module once."""

from __future__ import annotations

import transformers.models.auto.modeling_auto  # noqa: F401

import kvcompile.tools.cli.trial  # noqa: F401
