"""Warm: imported once by the server that a survey's processes are forked from; nothing here runs."""

from __future__ import annotations

import transformers.models.auto.modeling_auto  # noqa: F401

import kvcompile.tools.cli.trial  # noqa: F401
