"""Warm: imported once by the server from which a survey's processes are forked, to load the libraries."""

from __future__ import annotations

import transformers.models.auto.modeling_auto  # noqa: F401

import kvcompile.tools.cli.trial  # noqa: F401
